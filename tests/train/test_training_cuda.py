"""Training and its records on a GPU: the same as on a CPU, to what the types hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.benchmark import cost
from sosie.history import Recorder, open_run
from sosie.models import AtomConv2d, small_cnn
from sosie.train import Penalty
from sosie.train.many_networks import Stack, stacked_state, without_numbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
IMAGES = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions in float32 proper: TF32 would differ from a CPU in the fourth digit."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return small_cnn(**{"width": 8, "atoms": 6, **options})


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("what", ["atoms", "weights", "activations"])
def test_a_record_is_that_of_a_copy_on_the_cpu(what: Any, tmp_path: Path) -> None:
    model = network()
    runs = []
    for name, each in (("here", model), ("there", copy.deepcopy(model).to(DEVICE))):
        probe = {"probe": IMAGES} if what == "activations" else {}
        with Recorder(tmp_path / name, each, what, **probe) as recorder:
            for step in range(2):
                recorder.record(step)
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.mul_(1.25)
        assert {p.device.type for p in each.parameters()} == {"cpu" if name == "here" else DEVICE}
        runs.append(open_run(tmp_path / name))
    here, there = runs
    about = replace(there.about, run=here.about.run)  # every run has a random name
    assert (there.steps, there.sites, about) == (here.steps, here.sites, here.about)
    for k, site in ((k, site) for k in range(2) for site in here.sites):
        mine, theirs = here.tensor(k, site), there.tensor(k, site)
        if what == "atoms":
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5 * float(mine.abs().max()))


def test_a_step_of_a_stack_in_bfloat16_is_near_that_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(3, 16, 1, 28, 28, generator=generator), torch.randint(0, 10, (3, 16), generator=generator)
    start = stacked_state([network(seed) for seed in range(3)])
    moved: dict[tuple[str, bool], Tensor] = {}
    for device, mixed in (("cpu", False), (DEVICE, False), (DEVICE, True)):
        own = {name: tensor.to(device) for name, tensor in start.items()}
        stack = Stack(without_numbers(network()), own, mixed=mixed)
        answers = stack(x.to(device))
        assert answers.dtype == torch.float32
        stack.learn(x.to(device), y.to(device), torch.optim.SGD(stack.trained.values(), 0.1))
        assert all(t.device.type == device and t.dtype == torch.float32 for t in stack.trained.values())
        after = {name: tensor.detach().cpu() for name, tensor in stack.trained.items()}
        moved[device, mixed] = torch.cat([(after[name] - start[name]).flatten() for name in after])
    assert relative(moved[DEVICE, False], moved["cpu", False]) < 1e-3
    assert 1e-6 < relative(moved[DEVICE, True], moved["cpu", False]) < 0.1


def penalised(device: str, rows: int | None, mixed: bool, measure: str) -> tuple[float, Tensor]:
    """Value and gradient of the penalty alone."""
    model, x = network().to(device), IMAGES.to(device)
    with Penalty(model, measure, "relu*", weight=1.0, pairs="all", reduce="mean", rows=rows, every=1) as penalty:
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            model(x)
        term = penalty()
        assert term.device.type == device
        assert term.dtype == torch.float32
        term.backward()
    return float(term.detach()), gradients(model)


@pytest.mark.parametrize("measure", ["linear_cka", "debiased_cka"])
@pytest.mark.parametrize("rows", [8, None])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_a_penalty_is_that_on_the_cpu(rows: int | None, mixed: bool, measure: str) -> None:
    wanted, by = penalised("cpu", rows, False, measure)
    found, gradient = penalised(DEVICE, rows, mixed, measure)
    assert 0 < abs(wanted) < 1
    # bfloat16 has two and a half digits; the penalty itself is computed in float32.
    assert found == pytest.approx(wanted, abs=2e-2 if mixed else 1e-4)
    assert relative(gradient, by) < (0.3 if mixed else 2e-3)


def test_costs_are_those_of_the_gpu() -> None:
    measures = ["atom_cosine", "linear_cka", "wcka"]
    options: dict[str, Any] = {"input_shape": (1, 16, 16), "probes": [8, 32], "batch": 16}
    here = cost("small_cnn(atoms=6, width=4, size=16)", None, measures, **options)
    there = cost("small_cnn(atoms=6, width=4, size=16)", None, measures, device=DEVICE, **options)
    assert there.device == DEVICE
    assert there.memory == "allocated on the GPU"
    assert len(there) == len(here) == 4
    for mine, theirs in zip(here, there, strict=True):
        assert (theirs.measure, theirs.probes, theirs.sites) == (mine.measure, mine.probes, mine.sites)
        assert theirs.seconds > 0
        assert theirs.forward_flops == mine.forward_flops
        if theirs.probes is not None:  # atoms and weights are compared where they are
            assert theirs.peak_bytes > 0
    assert there.of("linear_cka", 32).peak_bytes >= there.of("linear_cka", 8).peak_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"groups": 2, "bias": False}, {"padding": 1, "padding_mode": "circular"}],
    ids=str,
)
def test_a_convolution_of_atoms_is_that_on_the_cpu(options: dict[str, Any]) -> None:
    layer = AtomConv2d(4, 8, 3, 5, **options)
    there = copy.deepcopy(layer).to(DEVICE)
    x = torch.randn(6, 4, 9, 9, generator=torch.Generator().manual_seed(0))
    sides = []
    for each, given in ((layer, x.clone().requires_grad_()), (there, x.to(DEVICE).requires_grad_())):
        answer = each(given)
        answer.square().sum().backward()
        assert given.grad is not None
        sides.append((answer.detach().cpu(), given.grad.cpu(), gradients(each)))
    for mine, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-4 * float(mine.abs().max()))
    with torch.autocast(DEVICE, torch.bfloat16):
        low = there(x.to(DEVICE))
    assert low.dtype == torch.bfloat16
    assert relative(low.float().cpu(), sides[0][0]) < 0.02
