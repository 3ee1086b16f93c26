"""Sketching leaves everything as it was found, and is not misled by how a model is run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_nets import InPlace, Residual, built, expected_loss, images, one_by_one, rows, state_of
from torch import Tensor, nn

from sosie.sketching import sketch


def gradients(model: nn.Module, x: Any, site: str = "stem", **options: Any) -> Tensor:
    return sketch(model, [x], sites=[site], size=None, **options).site(site).gradients.rows


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_left_as_found(fails: bool) -> None:
    class Noisy(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3), np.random.rand(), random.random()
            if fails and len(x) == 5:
                raise RuntimeError("no")
            return super().forward(x)

    model = built(Noisy)
    model.train()
    model.r1.eval()
    model.c1.weight.requires_grad_(False)
    before, randoms = state_of(model), random_states()
    loader = torch.utils.data.DataLoader(list(images(17)), batch_size=6)
    if fails:
        with pytest.raises(RuntimeError, match="no") as found:
            sketch(model, loader, sites=["b1", "fc"], size=8)
        assert "on inputs 12 to 16" in "".join(found.value.__notes__)
    else:
        sketch(model, loader, sites=["b1", "fc"], size=8)
    after = state_of(model)
    assert all(torch.equal(a, b) for a, b in zip(before.pop(3), after.pop(3), strict=True))
    assert before == after
    assert all(parameter.grad is None for parameter in model.parameters())
    assert randoms == random_states()


@pytest.mark.parametrize("when", ["loss", "rule"])
def test_an_exception_from_the_callers_own_functions(when: str) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("mine")

    model = built(Residual)
    before = state_of(model)
    with pytest.raises(KeyError, match="mine"):
        sketch(model, [rows()], sites=["stem"], **({"output": fail} if when == "loss" else {"rows": fail}))
    assert state_of(model) == before


def test_gradients_of_parameters_that_were_there_stay() -> None:
    model = built(Residual)
    model(rows()).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    gradients(model, rows())
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_seeds_decide_and_the_global_generator_does_not() -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(sketch(built(Residual), [rows()], sites=["stem"], size=8, seed=5).site("stem").hadamard.rows)
    assert torch.equal(*made)
    other = sketch(built(Residual), [rows()], sites=["stem"], size=8, seed=6).site("stem").hadamard.rows
    assert not torch.allclose(other, made[0])


def test_frozen_and_training_models_are_the_same() -> None:
    model = built(Residual)
    wanted = gradients(model, rows())
    model.train()
    assert torch.equal(gradients(model, rows()), wanted)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(gradients(model, rows()), wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_own_grad_mode_does_not_matter(mode: Callable[[], Any]) -> None:
    model = built(Residual)
    wanted = gradients(model, rows())
    with mode():
        assert torch.equal(gradients(model, rows()), wanted)
        assert torch.equal(gradients(model, rows() + 0), wanted)


def test_inputs_that_require_gradients() -> None:
    model, x = built(Residual), rows()
    wanted = gradients(model, x)
    x.requires_grad_()
    assert torch.equal(gradients(model, x), wanted)
    assert x.grad is None


def test_a_model_that_differentiates_inside_its_forward() -> None:
    class Energy(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.requires_grad_()
                x = x + torch.autograd.grad((x**2).sum(), x)[0]
            return super().forward(x)

    model = built(Energy)
    wanted = one_by_one(built(Residual), 3 * rows(), "stem", expected_loss(0.5))[1]
    assert torch.allclose(gradients(model, rows()), wanted, atol=1e-12)


def test_a_compiled_model() -> None:
    model = built(Residual)
    wanted = gradients(model, rows())
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(gradients(compiled, rows()), wanted)


def test_autocast() -> None:
    model = built(InPlace).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = sketch(model, [images().float()], sites=["b1"], size=8)
        assert torch.is_autocast_enabled("cpu")
    kept = found.site("b1")
    assert kept.gradients.rows.dtype == torch.float32
    assert kept.moment.dtype == torch.float64
    # The forward is in half precision, but what is made of its rows is not.
    g = sketch(model, [images().float()], sites=["b1"], size=None).site("b1").gradients.rows
    assert (kept.pairs.gradients - g).norm() < 0.1 * g.norm()
    exact = kept.pairs.gradients.double().T @ kept.pairs.features.double()
    assert (kept.moment - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, x = built(Residual), rows()
    wanted = gradients(model, x)
    found = sketch(model.to(dtype), [x.to(dtype)], sites=["stem"], size=8).site("stem")
    assert found.hadamard.rows.dtype == torch.float32
    assert (found.pairs.gradients - wanted).norm() < 0.1 * wanted.norm()


class Cut(Residual):
    """What is done under no_grad, or inference_mode, or detached."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detached":
            return self.head(self.left(self.stem(x).detach()))
        with torch.no_grad() if self.how == "no_grad" else torch.inference_mode():
            return super().forward(x)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_a_forward_without_gradients_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match=r"a forward without torch\.no_grad\(\)"):
        gradients(built(lambda: Cut(how)), rows())


def test_sites_that_the_answer_does_not_depend_on() -> None:
    with pytest.raises(ValueError, match="no gradient reaches stem: the answer does not depend on it; choose other"):
        sketch(built(lambda: Cut("detached")), [rows()], sites=["stem", "left"])

    class Aside(Residual):
        def forward(self, x: Tensor) -> Tensor:
            self.right(self.stem(x))
            return super().forward(x)

    sketch(built(Aside), [rows()], sites=["right@2"])
    with pytest.raises(ValueError, match="no gradient reaches right"):
        sketch(built(Aside), [rows()], sites=["right", "right@2"])
    # Features alone need no gradient.
    assert sketch(built(Aside), [rows()], sites=["right"], kernels="features").parts == ("features",)


def test_a_shift_of_the_features_changes_nothing() -> None:
    import sosie

    class Shifted(Residual):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by, self.shift = by, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.shift(x + self.by) - self.by)

    x = rows(64).float()
    made = [sketch(built(lambda by=by: Shifted(by)).float(), [x], sites=["shift"], size=16) for by in (0, 100)]
    for measure in ("linear_cka", "debiased_cka", "normalized_bures"):
        found = sosie.compare(*(k.using("features") for k in made), measures=measure).matrix()
        assert found[0, 0] == pytest.approx(1, abs=2e-5), measure
