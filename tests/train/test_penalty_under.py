"""The penalty under torch.compile, autocast, checkpointing, several processes; and a model left as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sosie.capture import SiteError
from sosie.models import cifar_resnet
from sosie.train import Penalty

SITES = ["parts.0", "parts.1", "parts.2"]


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 12)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True)) for _ in range(3))
        self.head = nn.Linear(12, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.stem(x))
        for part in self.parts:
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(x)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module, called: Any, count: int = 5, **options: Any) -> list[tuple[float, Tensor]]:
    """Values and gradients of some steps."""
    found = []
    with Penalty(model, **{"weight": 1.0, "every": 2, "sites": "leaves", **options}) as penalty:
        for step in range(count):
            model.zero_grad()
            answer = called(inputs(step))
            term = penalty()
            (answer.square().mean() + term).backward()
            gradients = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
            found.append((float(term.detach()), gradients))
    return found


def same(found: list[tuple[float, Tensor]], expected: list[tuple[float, Tensor]], close: float = 1e-6) -> None:
    for (value, gradients), (wanted, by) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, abs=10 * close)
        assert torch.allclose(gradients, by, rtol=0, atol=close * max(1.0, float(by.abs().max())))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("backend", "rows"), [("aot_eager", None), ("eager", 5)])
def test_compiled_code_stays_compiled(backend: str, rows: int | None) -> None:
    model = Net()
    expected = steps(model, model, rows=rows)
    assert [value > 0 for value, _ in expected] == [True, False, True, False, True]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    same(steps(model, compiled, rows=rows), expected)
    # Due and not due: nothing else is compiled, and nothing ran outside.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(compiled(inputs()), model(inputs()))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("plain", [False, True])
def test_compiled_before_it_was_attached(plain: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4)) if plain else Net()
    compiled = torch.compile(model, backend="eager")
    compiled(inputs())
    with Penalty(model) as penalty:
        compiled(inputs())
        if torch.__version__ < (2, 5) and not plain:
            assert penalty() > 0, "this torch compiles anew"
            return
        with pytest.raises((RuntimeError, SiteError), match="attach first"):
            penalty()


@pytest.mark.parametrize("rows", [8, None])
def test_under_autocast_grams_are_float32(rows: int | None) -> None:
    torch.manual_seed(0)
    model = cifar_resnet(depth=8, width=0.5)
    x = torch.randn(10, 3, 16, 16)
    kept: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: kept.update({name: out.detach()}))
        for name in ("layer1.0", "layer2.0", "layer3.0")
    ]
    with Penalty(model, weight=1.0, pairs="all", rows=rows) as penalty, torch.autocast("cpu", torch.bfloat16):
        model(x)
        found = penalty()
    found.backward()
    for handle in handles:
        handle.remove()
    assert found.dtype == torch.float32
    assert kept["layer1.0"].dtype == torch.bfloat16
    grams = []
    for each in kept.values():
        rows_ = each[:rows].flatten(1).double()
        rows_ = rows_ - rows_.mean(0)
        gram = rows_ @ rows_.T
        grams.append(gram / gram.norm())
    expected = 2 * sum(float((grams[i] * grams[j]).sum()) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert float(found.detach()) == pytest.approx(expected, abs=1e-6)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("rows", [5, None])
@pytest.mark.parametrize("last", [False, True])
def test_checkpointing(rows: int | None, last: bool) -> None:
    model = Net()
    expected = steps(model, model, rows=rows, sites=SITES)
    same(steps(checkpointed := Net(reentrant=False), checkpointed, rows=rows, sites=SITES), expected)
    if last:
        model = Net(reentrant=True)
        with pytest.raises(SiteError, match=r"'parts.0' fired under no_grad.*use_reentrant=False"):
            steps(model, model, rows=rows, sites=SITES)
        assert hooks_of(model) == 0


def test_channels_last_is_the_same() -> None:
    torch.manual_seed(0)
    model = cifar_resnet(depth=8, width=0.5)
    x = torch.randn(10, 3, 16, 16)
    values = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=layout)
        for rows in (8, None):
            with Penalty(model, weight=1.0, rows=rows) as penalty:
                model(x.contiguous(memory_format=layout))
                values.append(float(penalty().detach()))
    assert values[2:] == pytest.approx(values[:2], abs=1e-5)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_model_is_left_as_found_and_nothing_is_held() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes"), Penalty(model, rows=None):
        model(inputs()[:, :5])
    assert hooks_of(model) == 0
    with Penalty(model, rows=None) as penalty:
        assert hooks_of(model) > 0
        model.parts[2].register_forward_hook(_fails)
        with pytest.raises(ZeroDivisionError):
            model(inputs())
        with pytest.raises(RuntimeError, match="did not finish"):
            penalty()
    model.parts[2]._forward_hooks.clear()
    assert hooks_of(model) == 0
    with Penalty(model, rows=None, every=1) as penalty:
        model(inputs())
        penalty().backward()
        gc.collect()
        hooks = penalty._hooks[0]
        assert not hooks._calls
        assert not hooks._live
        with pytest.raises(RuntimeError, match="since the last step"):
            penalty()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _fails(module: nn.Module, args: Any, output: Any) -> None:
    raise ZeroDivisionError


def test_a_whole_activation_is_copied_only_where_it_is_overwritten() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))
    kept: list[int] = []
    live: dict[str, int] = {}
    for k in (0, 2):
        model[k].register_forward_hook(lambda m, a, out, k=k: live.update({str(k): out.data_ptr()}))
    with Penalty(model, "mean_cca", ["0", "2"], 1.0, pairs="all", rows=None, every=1) as penalty:
        for _ in range(2):
            model(inputs())
            kept = [call.kept.data_ptr() for call in penalty._hooks[0]._calls]
            penalty().backward()
    assert kept[0] != live["0"]
    assert kept[1] == live["2"]
    # Something that changes its mind is noticed, and can be run again.
    with Penalty(model, sites=["2", "4"], weight=1.0, rows=None, every=1) as penalty:
        model(inputs())
        penalty()
        answer = model(inputs())
        with torch.no_grad():
            answer.zero_()
        with pytest.raises(SiteError, match="'4' was changed in place"):
            penalty()
        model(inputs())
        penalty().backward()


class Operations(TorchDispatchMode):
    """Counts those that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in ("detach", "empty", "promote_types"))
        return func(*args, **kwargs or {})


def operations(model: nn.Module, penalty: Penalty | None) -> tuple[int, int]:
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with Operations() as forward:
        loss = model(images).square().mean()
        loss = loss if penalty is None else loss + penalty()
    with Operations() as backward:
        loss.backward()
    model.zero_grad()
    return forward.count, backward.count


@pytest.mark.parametrize(("rows", "most"), [(8, (45, 55)), (None, (190, 65))])
def test_a_step_adds_few_operations(rows: int | None, most: tuple[int, int]) -> None:
    """A GPU waits for each to be asked for. (Of all rows a CPU's forward has its own ways, with more of them.)"""
    torch.manual_seed(0)
    model = cifar_resnet(depth=20, width=0.25)
    plain = operations(model, None)
    with Penalty(model, rows=rows, every=2) as penalty:
        operations(model, penalty)
        idle = operations(model, penalty)
        due = operations(model, penalty)
    assert (idle[0] - plain[0], idle[1] - plain[1]) == (2, 0)  # a zero, added to the loss
    assert due[0] - plain[0] <= most[0]
    assert due[1] - plain[1] <= most[1]


def of_a_rank() -> list[Tensor | None]:
    model = nn.parallel.DistributedDataParallel(Net())
    with Penalty(model, sites=SITES, weight=1.0, every=1) as penalty:
        answer = model(inputs(torch.distributed.get_rank()))
        (answer.square().mean() + penalty()).backward()
    return [p.grad for p in model.parameters()]


def test_several_processes_average_their_penalties() -> None:
    expected = []
    for rank in range(2):
        model = Net()
        with Penalty(model, sites=SITES, weight=1.0, every=1) as penalty:
            (model(inputs(rank)).square().mean() + penalty()).backward()
        expected.append([p.grad for p in model.parameters()])
    for own in run_ranks(2, of_a_rank):
        for gradient, one, other in zip(own, *expected, strict=True):
            assert torch.allclose(gradient, (one + other) / 2, atol=1e-6)
