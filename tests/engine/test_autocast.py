"""Inside torch.autocast the model's forward is the caller's matter, and our own arithmetic has all its digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.capture import Chunk
from sosie.measures import MEASURES
from sosie.sketching import task2vec
from sosie.sketching.fisher import PROBE, SquaredGradients

BFLOAT16 = 2.0**-8


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5)).eval()


def sites(seed: int) -> dict[str, Tensor]:
    x = numbers(80, 10, seed=seed)
    return {"one": x, "two": (x @ numbers(10, 30)).relu() + 3}


def flat(found: Any) -> list[float]:
    return np.concatenate([np.ravel(each.value) for each in found.values.values()]).tolist()


CLOSED = ["debiased_cka", "linear_cka", "mean_cca", "procrustes_distance", "mutual_knn(k=5)", "rsa"]


@pytest.mark.parametrize("name", CLOSED)
def test_a_measure_of_arrays(name: str) -> None:
    x, y = numbers(60, 7), numbers(60, 9, seed=1).relu()
    y[:, :4] += x[:, :4]
    expected = sosie.measure(name, x, y)
    with half():
        assert sosie.measure(name, x, y) == expected


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"null": "permutation", "draws": 20, "interval": True}])
def test_comparing_saved_activations(options: dict[str, Any]) -> None:
    a, b = sites(0), sites(1)
    expected = sosie.compare(a, b, measures=CLOSED, **options)
    with half():
        found = sosie.compare(a, b, measures=CLOSED, **options)
    assert found.rows() == expected.rows()


DOORS: dict[str, Callable[[], Any]] = {
    "linear maps": lambda: flat(sosie.compare_weights(net(0), net(1), measures="wcka")),
    "weights": lambda: flat(sosie.compare_weights(net(0), net(1), measures="weight_cosine")),
    "outputs": lambda: flat(sosie.compare_outputs(numbers(50, 5), numbers(50, 5, seed=1), kind="logits")),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_runs_no_forward_gives_the_same(door: str) -> None:
    expected = DOORS[door]()
    with half():
        np.testing.assert_array_equal(DOORS[door](), expected)


def test_sketches_of_the_same_rows_compare_the_same() -> None:
    a, b = (sosie.sketch(net(k), numbers(64, 12), size=32) for k in (0, 1))
    expected = flat(sosie.compare(a, b))
    with half():
        assert flat(sosie.compare(a, b)) == expected


def shown(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, Tensor]:
    """What a model gives under autocast, in float64."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.update({name: output.detach().double()})
        )
        for name in names
    ]
    with half(), torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_comparing_models_computes_with_what_they_give_under_autocast(exact: bool) -> None:
    x, names = numbers(96, 12), ["0", "2", "4"]
    a, b = net(0), net(1)
    rows_a, rows_b = shown(a, x, names), shown(b, x, names)
    expected = sosie.compare(rows_a, rows_b, measures=CLOSED, exact=exact, precision="float64")
    with half():
        found = sosie.compare(a, b, [x], measures=CLOSED, sites_a=names, sites_b=names, exact=exact)
    for name in expected.values:
        np.testing.assert_allclose(found.values[name].value, expected.values[name].value, atol=2e-5)
    plain = sosie.compare(a, b, [x], measures="linear_cka", sites_a=names, sites_b=names, exact=exact)
    assert not np.array_equal(found.matrix("linear_cka"), plain.matrix("linear_cka")), "the forward was in autocast"


def test_outputs_of_models_are_compared_as_they_are_under_autocast() -> None:
    x, a, b = numbers(96, 12), net(0), net(1)
    with half(), torch.no_grad():
        given = a(x), b(x)
    expected = sosie.compare_outputs(*(each.double() for each in given), kind="logits")
    with half():
        found = sosie.compare_outputs(a, b, [x], kind="logits")
    np.testing.assert_allclose(flat(found), flat(expected), atol=1e-6)


def test_a_stitch_is_fitted_to_what_the_models_give_under_autocast() -> None:
    x, a, b = numbers(200, 12), net(0), net(1)
    rows_a, rows_b = shown(a, x, ["2"])["2"], shown(b, x, ["2"])["2"]
    with half():
        found = sosie.stitch(a, "2", b, "2", x)
    design = torch.cat([rows_a, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    expected = torch.linalg.lstsq(design, rows_b).solution[:-1].T
    joint = next(p for p in found.model.joint.parameters() if p.ndim == 2)
    torch.testing.assert_close(joint.detach().double(), expected, atol=1e-4, rtol=0)


def test_a_sketch_under_autocast_is_of_what_the_model_gives() -> None:
    x, model = numbers(64, 12), net(0)
    rows = shown(model, x, ["2"])["2"]
    with half():
        found = sosie.sketch(model, [x], sites="2", size=None, kernels="features")
        value = sosie.compare(found.using("features"), found.using("features")).matrix("linear_cka")
    kept = found.sites[0].features.rows
    torch.testing.assert_close(kept.double(), rows, atol=1e-5, rtol=0)
    np.testing.assert_allclose(value, 1, atol=1e-9)


def test_squared_gradients_go_by_their_rules_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though autograd's gradients, against which they are tried, are products of bfloat16."""

    run = SquaredGradients._run_by_input

    def only_to_try(self: Any, chunk: Chunk, cotangents: Any, names: list[str]) -> Any:
        assert not names or chunk.count == PROBE, "autograd was asked input by input, which is slow"
        return run(self, chunk, cotangents, names)

    monkeypatch.setattr(SquaredGradients, "_run_by_input", only_to_try)
    model, x = net(0), numbers(40, 12)
    expected = task2vec(model, x, exact=True).vector
    with half():
        found = task2vec(model, x, exact=True).vector
    assert float((found - expected).norm()) < 4 * BFLOAT16 * float(expected.norm())


@pytest.mark.parametrize("name", ["linear_cka", "debiased_cka", "procrustes_angle", "mean_cca"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_a_term_of_a_loss_a_measure_is_float32_and_gradients_flow(name: str, dtype: torch.dtype) -> None:
    x, y = numbers(40, 6).to(dtype), numbers(40, 6, seed=1).to(dtype)
    y = (y + x).detach()
    wide = x.double().requires_grad_()
    expected = MEASURES[name].of(wide, y.double())
    expected.backward()
    given = x.clone().requires_grad_()
    with half():
        found = MEASURES[name].of(given, y)
    found.backward()
    assert found.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(found.double(), expected.detach(), atol=1e-5, rtol=0)
    assert wide.grad is not None
    assert given.grad is not None
    tolerance = float(wide.grad.abs().max()) * (BFLOAT16 if dtype == torch.bfloat16 else 1e-4)
    torch.testing.assert_close(given.grad.double(), wide.grad, atol=tolerance, rtol=0)
