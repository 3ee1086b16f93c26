"""Several threads at once: a model is one thread's at a time, and what the process has only one of is left as found."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.capture import as_found, watch
from sosie.models import open_model
from sosie.models.specification import seeded
from sosie.process_state import _MATMUL
from sosie.train import Penalty

PATIENCE = 60  # seconds after which a thread counts as hanging


@pytest.fixture
def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(32, 1, 8, 8, generator=generator).split(16))


def net(seed: int, body: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    body = body or nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(nn.Conv2d(1, 4, 3), body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 16, 5)).train()


def values(a: nn.Module, b: nn.Module, images: list[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    found = sosie.compare(a, b, images, measures=["debiased_cka", "mutual_knn(k=3)"])
    return [each.value for each in found.values.values()]


def state_of(model: nn.Module) -> list[Any]:
    flags = [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return [flags, [p.requires_grad for p in model.parameters()], [t.tolist() for t in model.state_dict().values()]]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call gives in a thread of its own; an error is raised here."""
    with ThreadPoolExecutor(len(calls)) as executor:
        return [future.result(PATIENCE) for future in [executor.submit(call) for call in calls]]


# One model in several threads


def test_one_model_in_four_threads_gives_what_one_thread_gives(images: list[torch.Tensor]) -> None:
    a, b = net(0), net(1)
    before, expected = (state_of(a), state_of(b)), values(a, b, images)

    def several() -> list[Any]:
        return [values(a, b, images) for _ in range(3)]

    for found in itertools.chain(*at_once(*[several] * 4)):
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)
    assert (state_of(a), state_of(b)) == before


def test_two_models_in_either_order_do_not_wait_for_each_other_for_ever(images: list[torch.Tensor]) -> None:
    a, b = net(0), net(1)
    expected = values(a, b, images)
    calls = [lambda: values(a, b, images), lambda: values(b, a, images)] * 3
    for k, found in enumerate(at_once(*calls)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one if k % 2 == 0 else one.T, other, atol=1e-6)
    outputs = [lambda: sosie.compare_outputs(a, b, images), lambda: sosie.compare_outputs(b, a, images)] * 2
    assert len(at_once(*outputs)) == 4


def test_models_that_share_a_module_wait_for_each_other(images: list[torch.Tensor]) -> None:
    body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    pairs = [(net(0, body), net(1, body)), (net(2, body), net(3, body))]
    before, expected = [state_of(a) for a, _ in pairs], [values(a, b, images) for a, b in pairs]
    for k, found in enumerate(at_once(*[lambda pair=pair: values(*pair, images) for pair in pairs * 2])):
        for one, other in zip(found, expected[k % 2], strict=True):
            assert np.array_equal(one, other)
    assert [state_of(a) for a, _ in pairs] == before


def test_models_that_share_a_parameter_alone_wait_too() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    order: list[str] = []

    def second() -> None:
        with as_found(b):
            order.append("b")

    with as_found(a):
        worker = threading.Thread(target=second)
        worker.start()
        worker.join(0.1)
        order.append("a")
    worker.join(PATIENCE)
    assert order == ["a", "b"]


def test_one_thread_goes_through_what_it_holds(images: list[torch.Tensor]) -> None:
    model = net(0)
    before = state_of(model)
    with as_found(model), watch(model) as seen, watch(model):
        found = sosie.compare(model, model, images)
        seen.run(images[0])
    assert np.allclose(np.diag(found.matrix("debiased_cka")), 1)
    assert state_of(model) == before


def test_threads_that_would_wait_for_each_other_for_ever_are_told_so() -> None:
    models = net(0), net(1)
    meet, told = threading.Barrier(2), []

    def nested(first: nn.Module, second: nn.Module) -> None:
        with watch(first):
            meet.wait(PATIENCE)
            try:
                with watch(second):
                    pass
            except RuntimeError as error:
                told.append(str(error))

    at_once(lambda: nested(*models), lambda: nested(*reversed(models)))
    assert len(told) == 1
    assert "give all models to one call" in told[0]


@pytest.mark.parametrize("left", ["by an error", "abandoned"])
def test_a_model_is_free_again(left: str, images: list[torch.Tensor]) -> None:
    model = net(0)

    def looking() -> Iterator[None]:
        with as_found(model), watch(model):
            yield

    if left == "abandoned":
        generator = looking()
        next(generator)
        del generator
        gc.collect()
    else:
        with pytest.raises(KeyError), watch(model):
            raise KeyError
    assert at_once(lambda: values(model, model, images))


def test_a_penalty_refuses_other_threads_and_lets_its_own_compare(images: list[torch.Tensor]) -> None:
    model = net(0)
    with Penalty(model, every=1, rows=None) as penalty:
        values(model, model, images)
        with pytest.raises(RuntimeError, match="a penalty is attached to this model in another thread"):
            at_once(lambda: values(model, model, images))
        model(images[0])
        assert penalty().requires_grad
    assert at_once(lambda: values(model, model, images))


# What the whole process has only one of


def test_the_last_to_leave_puts_attentions_fast_path_back() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval() for _ in range(2)]
    assert torch.backends.mha.get_fastpath_enabled()
    first, second = (watch(layer, "linear1") for layer in layers)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled(), "the second is still watched"
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_last_to_leave_allows_compiled_code_again() -> None:
    def compiled() -> Any:
        return torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")

    def compiles() -> bool:
        """Whether a model is compiled when it is first called."""
        calls: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            calls.append(graph)
            return graph.forward

        torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
        return bool(calls)

    assert compiles()
    first, second = watch(compiled(), "0"), watch(compiled(), "0")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not compiles(), "the second is still watched"
    second.__exit__(None, None, None)
    assert compiles()


def test_of_two_precisions_of_products_the_most_exact_counts() -> None:
    matmul = torch.backends.cuda.matmul  # a setting that a machine without a GPU has too

    def precision() -> Any:
        return getattr(matmul, _MATMUL.setting)

    before = precision()
    coarse, exact = _MATMUL.at("tf32"), _MATMUL.at("ieee")
    coarse.__enter__()
    assert precision() == _MATMUL.values["tf32"]
    exact.__enter__()
    coarse.__exit__(None, None, None)
    assert precision() == _MATMUL.values["ieee"], "the second still needs it"
    exact.__exit__(None, None, None)
    assert precision() == before


# Random numbers


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def drawn_meanwhile(work: Callable[[], Any]) -> list[tuple[float, float, float]]:
    """What another thread draws while work is done."""
    found, done = [], threading.Event()

    def draw() -> None:
        while not done.is_set():
            found.append((torch.rand(1, dtype=torch.float64).item(), np.random.random_sample(), random.random()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return found


def test_another_threads_draws_are_not_repeated(images: list[torch.Tensor]) -> None:
    a, b = net(0), net(1)
    shuffled = DataLoader(TensorDataset(torch.cat(images)), batch_size=16, shuffle=True)
    found = drawn_meanwhile(lambda: [sosie.compare(a, b, shuffled, measures="linear_cka") for _ in range(5)])
    for each in zip(*found, strict=True):
        assert len(set(each)) == len(found) > 100


def test_alone_the_random_state_is_put_back_though_a_loader_has_threads_of_its_own(
    images: list[torch.Tensor],
) -> None:
    loader = DataLoader(TensorDataset(torch.cat(images)), batch_size=16, num_workers=1, shuffle=True)
    model, before = net(0), random_states()
    sosie.compare(model, model, loader)
    assert random_states() == before


def test_models_opened_in_threads_have_the_weights_of_their_seeds() -> None:
    wanted = {seed: open_model(f"small_cnn(seed={seed})").model for seed in range(4)}

    def is_right(k: int) -> bool:
        model = open_model(f"small_cnn(seed={k % 4})").model
        with as_found(model):
            model(torch.zeros(2, 1, 28, 28))
        pairs = zip(model.parameters(), wanted[k % 4].parameters(), strict=True)
        return all(torch.equal(mine, other) for mine, other in pairs)

    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(is_right, range(200)))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_those_of_the_seed_while_another_thread_draws() -> None:
    wanted = open_model("small_cnn(seed=3)").model.state_dict()
    opened: list[dict[str, torch.Tensor]] = []
    found = drawn_meanwhile(
        lambda: opened.extend(open_model("small_cnn(seed=3)").model.state_dict() for _ in range(20))
    )
    assert all(torch.equal(state[key], wanted[key]) for state in opened for key in wanted)
    ours = [each[0] for each in found]
    assert len(set(ours)) == len(ours)


@pytest.mark.parametrize("draw", [
    lambda: nn.init.trunc_normal_(torch.empty(50, 4)), lambda: nn.init.orthogonal_(torch.empty(5, 4)),
    lambda: torch.randn(40), lambda: torch.rand(3, 3), lambda: torch.randperm(30), lambda: torch.randint(0, 9, (20,)),
    lambda: torch.rand_like(torch.zeros(7)), lambda: torch.bernoulli(torch.full((30,), 0.5)),
    lambda: torch.normal(0.0, 1.0, (20,)), lambda: nn.functional.dropout(torch.ones(30)),
    lambda: torch.multinomial(torch.ones(9), 4), lambda: nn.LSTM(3, 4).weight_hh_l0.detach(),
])  # fmt: skip
def test_a_seed_gives_the_numbers_that_torchs_global_generator_gives(draw: Callable[[], torch.Tensor]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        wanted = draw()
    if draw.__code__.co_names[1] == "rand_like" and "generator" not in str(torch.ops.aten.rand_like.default._schema):
        pytest.skip("rand_like draws from the global generator alone in this torch")
    before = torch.get_rng_state()
    with seeded(7):
        assert torch.equal(draw(), wanted)
    assert torch.equal(torch.get_rng_state(), before)


WITHOUT_COMPILER = """
import sys, torch, sosie
from sosie.models import open_model

a, b = (open_model(f"small_cnn(seed={k})").model for k in (0, 1))
sosie.compare(a, b, [torch.rand(16, 1, 28, 28)])
sosie.compare_weights(a, b)
assert "torch._dynamo" not in sys.modules
"""


def test_a_comparison_does_not_import_the_compiler() -> None:
    """That takes a second, as long as all the rest of it."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True, timeout=PATIENCE)
