"""Penalties of odd models and at odd moments: copies, frozen parts, inference mode, batches without rows."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.capture import SiteError
from sosie.measures import MEASURES
from sosie.train import Attached, Penalty
from sosie.train.penalties import LOOKS
from sosie.train.similarity import _places


def inputs(count: int = 12) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0))


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved])
def test_a_copy_made_while_it_is_attached_is_not_part_of_it(how: Callable[[nn.Module], Any], rows: int | None) -> None:
    model, x = network(), inputs()
    with Penalty(model, rows=rows, every=1) as penalty:
        before = how(model)
        model(x)
        after = how(model)  # with the graph of a forward on the hooks
        for each in (before, after):
            with torch.no_grad():
                each(x[:2])  # neither seen nor refused
        alone = penalty()
        alone.backward()
    assert hooks(model) == 0
    with Penalty(network(), rows=rows, every=1) as penalty:
        penalty._models[0](x)
        assert alone.equal(penalty())
    with Penalty(after, rows=rows, every=1) as penalty:  # the copy takes a penalty of its own
        after(x)
        assert alone.equal(penalty())


@pytest.mark.parametrize("rows", [None, 8])
def test_what_was_measured_in_inference_mode_first_is_trained_with_later(rows: int | None) -> None:
    model, x = network(), inputs()
    _places.cache_clear()  # what it keeps must do for everybody who comes later
    with Penalty(model, rows=rows, every=1) as penalty:
        with torch.inference_mode():
            model(x)
            shown = penalty()
        model(x)
        found = penalty()
        found.backward()
    assert found.item() == pytest.approx(shown.item(), rel=1e-6)
    assert bool(model[0].weight.grad.abs().sum() > 0)


class Line(nn.Module):
    """Gives a number an input, without a dimension of features, and once a number in all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one, self.flat, self.sum = nn.Linear(6, 5), nn.Linear(5, 1), nn.Flatten(0), Sum()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.sum(self.flat(self.one(self.wide(x))) * (1 if scale is None else scale))


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize("rows", [None, 8])
def test_a_site_of_one_number_an_input_is_one_neuron(rows: int | None) -> None:
    torch.manual_seed(0)
    model, x = Line(), inputs()
    wide = model.wide(x).detach()[:rows].double()
    wanted = MEASURES["linear_cka"].of(wide, wide @ model.one.weight.detach().double().T)
    with Penalty(model, sites=["wide", "flat"], pairs="all", reduce="mean", weight=1.0, rows=rows, every=1) as penalty:
        model(x)
        found = penalty()
        found.backward()
        assert found.item() == pytest.approx(float(wanted), abs=1e-6)
    target = {"flat": wide.sum(1)} if rows is None else {"flat": torch.cat([wide.sum(1), torch.zeros(4)])}
    with Penalty(model, sites=["flat"], weight=1.0, rows=rows, every=1, target=target) as penalty:
        model(x)
        wanted = MEASURES["linear_cka"].of(wide @ model.one.weight.detach().double().T, wide.sum(1, keepdim=True))
        assert penalty().item() == pytest.approx(1 - float(wanted), abs=1e-6)
    with Penalty(model, sites=["wide", "sum"], pairs="all", rows=rows, every=1) as penalty:
        model(x)
        with pytest.raises(SiteError, match=r"site 'sum' has shape \(\).*must count 12 inputs"):
            penalty()


def test_inputs_are_counted_by_the_first_tensor_that_has_rows() -> None:
    class Scaled(Line):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, scale)

    model = Scaled()
    with Penalty(model, sites=["wide", "flat"], pairs="all", every=1, weight=1.0) as penalty:
        model(torch.tensor(2.0), inputs())
        assert 0 < penalty().item() <= 2


def test_an_empty_batch_has_too_few_rows() -> None:
    model = network()
    with Penalty(model, rows=None, every=1) as penalty:
        model(inputs(0))  # not an error of the forward
        with pytest.raises(ValueError, match="linear_cka of 0 rows is constant: it needs at least 3"):
            penalty()


def test_members_with_other_batches_are_refused() -> None:
    members = [network(), network()]
    with Penalty(members, sites=["1"], rows=None, every=1) as penalty:
        for member, count in zip(members, (12, 7), strict=True):
            member(inputs(count))
        with pytest.raises(ValueError, match=r"'1 of model 0' gives 12 rows and '1 of model 1' 7, .* the same inputs"):
            penalty()


@pytest.mark.parametrize("rows", [None, 8])
def test_a_penalty_that_nothing_learns_from_is_refused(rows: int | None) -> None:
    model, x = network(), inputs()
    model[0].requires_grad_(False)
    with Penalty(model, sites=["0", "1"], rows=rows, every=1) as penalty:
        task = model(x).sum()  # trains what comes after
        with pytest.raises(SiteError, match=r"no gradient flows from .*'0', .*'1': all parameters before them"):
            task + penalty()
        with torch.no_grad():
            model(x)
            assert penalty() > 0  # measured, not trained with
    with Penalty(model, sites=["1", "2"], pairs="all", rows=rows, every=1) as penalty:
        model(x)
        penalty().backward()  # one side learns
    with Attached(model, "0", lambda seen: next(iter(seen.values())).sum()) as attached:
        model(x)
        with pytest.raises(SiteError, match="no gradient flows from '0'"):
            attached()
    members = [network().requires_grad_(False) for _ in range(2)]
    with Penalty(members, "wcka", every=1) as penalty, pytest.raises(ValueError, match="they are frozen"):
        penalty()


def test_a_layer_that_passes_on_what_it_got_keeps_its_name() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 8))
    for rows in (None, 8):
        with Penalty(model, sites=["0", "1", "2"], pairs="all", rows=rows, every=1) as penalty:
            model(inputs())
            penalty().backward()
        assert [(row["site_a"], row["site_b"]) for row in penalty.last] == [("0", "1"), ("0", "2"), ("1", "2")]
        assert penalty.last[0]["value"] == pytest.approx(1)
        assert penalty.last[1]["value"] == pytest.approx(penalty.last[2]["value"])


def test_what_is_no_number_is_named_beyond_the_models_own_sites() -> None:
    model, x = network(), inputs()
    target = {"1": torch.randn(12, 4), "3": torch.full((12, 4), torch.nan)}
    with Penalty(model, sites=["1", "3"], every=1, target=target) as penalty:
        model(x)
        with pytest.raises(ValueError, match="step 1 is NaN or infinite; not finite between '3' and '3 of the target'"):
            penalty()
    members = [network(), network()]
    with torch.no_grad():
        members[1][4].weight.fill_(torch.nan)
    with Penalty(members, "weight_cosine", every=1) as penalty, pytest.raises(ValueError, match="'4 of model 0' and"):
        penalty()


def test_a_target_of_another_type_is_told_in_words() -> None:
    model = network()
    with Penalty(model, sites=["1", "3"], every=1, target=network().double()) as penalty:
        model(inputs())
        with pytest.raises(ValueError, match="inputs of float32 for a model of float64"):
            penalty()


def test_what_is_looked_at_later_names_the_step_it_was() -> None:
    """As on a GPU, which is not waited for at every step."""
    model, x = network(), inputs()
    penalty = Attached(model, "1", lambda seen: next(iter(seen.values())).sum(), every=2)
    penalty.__enter__()
    penalty.go_to(2 * (LOOKS + 1))  # the second due step after the last look
    model(x)
    penalty()
    assert penalty._bad is not None
    assert not penalty._bad.any()
    penalty._bad[1].add_(torch.tensor(torch.inf), alpha=0)
    with pytest.raises(ValueError, match="the penalty of step 103 is NaN"):
        penalty.__exit__(None, None, None)


class Overwriting(nn.Module):
    """Layers whose outputs are overwritten by what is no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu_()).relu_())


@pytest.mark.parametrize("rows", [None, 8])
def test_what_is_overwritten_in_inference_mode_is_read_anew(rows: int | None) -> None:
    """Tensors of inference mode have no versions that would tell."""
    model, x, found = Overwriting(), inputs(), []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Penalty(model, sites=["a", "b", "c"], rows=rows, every=1) as penalty:
            model(x)
            found.append(penalty().item())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("rows", [None, 8])
def test_an_output_that_is_overwritten_after_the_penalty_has_read_it(rows: int | None) -> None:
    """A gradient of other numbers than were read is refused, and the next step copies them."""
    model, x = network(), inputs()

    def step(penalty: Penalty, *, in_place: bool) -> Tensor:
        model.zero_grad()
        out = model(x)
        term = penalty()
        loss = (out.mul_(2) if in_place else out * 2).square().sum() + term
        loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    options: dict[str, Any] = {"sites": "leaves", "pairs": "all", "weight": 100.0, "rows": rows, "every": 1}
    with Penalty(model, **options) as penalty:
        wanted = step(penalty, in_place=False)
    with Penalty(model, **options) as penalty:
        found = [step(penalty, in_place=True)]  # the first step copies all
        if rows is None:
            with pytest.raises(SiteError, match="output of site '4' was changed in place after penalty"):
                step(penalty, in_place=True)
        found.append(step(penalty, in_place=True))
    for each in found:
        assert torch.allclose(each, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_a_penalty_that_is_never_left_goes_with_its_model() -> None:
    model = network()
    penalty = Penalty(model, rows=None, every=1).__enter__()
    model(inputs())
    gone = weakref.ref(model)
    del model, penalty
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(torch.__version__ < (2, 5), reason="gradients of torch.func have no values to look at inside it")
@pytest.mark.parametrize("measure", ["linear_cka", "debiased_cka", "kernel_alignment"])
@pytest.mark.parametrize("width", [8, 2**18])
def test_functional_gradients_are_the_same(measure: str, width: int) -> None:
    """Layers that are done together, and one that is too wide for that."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width)), inputs()
    given = {name: each.detach() for name, each in model.named_parameters()}
    with Penalty(model, measure, "leaves", 1.0, pairs="all", every=1) as penalty:

        def value(parameters: dict[str, Tensor]) -> Tensor:
            torch.func.functional_call(model, parameters, (x,))
            return penalty()

        found = torch.func.grad(value)(given)
        model(x)
        penalty().backward()
    for name, each in model.named_parameters():
        assert torch.allclose(found[name], each.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("term", "got"),
    [(lambda seen: next(iter(seen.values())).sum(0), r"a tensor of shape \(8,\)"), (lambda seen: 2.0, "float")],
    ids=["vector", "float"],
)
def test_a_term_that_is_no_single_number_is_refused(term: Callable[..., Any], got: str) -> None:
    model = network()
    with Attached(model, "1", term) as penalty:
        model(inputs())
        with pytest.raises(ValueError, match=f"a single number, a tensor of no dimensions; got {got}"):
            penalty()


class Pooled(nn.Module):
    """Layers of one shape for small images, of two for large ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pooled = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(8))
        self.parts = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), pooled, nn.Conv2d(4, 4, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


@pytest.mark.parametrize("rows", [None, 4])
def test_stages_that_change_with_the_size_of_images(rows: int | None) -> None:
    model = Pooled()
    images = {size: torch.randn(5, 3, size, size, generator=torch.Generator().manual_seed(size)) for size in (8, 16)}
    options: dict[str, Any] = {"sites": ["parts.0", "parts.1", "parts.2"], "rows": rows, "every": 1, "weight": 1.0}
    wanted = {}
    for size, batch in images.items():
        with Penalty(model, **options) as penalty:
            model(batch)
            wanted[size] = penalty().item()
    with Penalty(model, **options) as penalty:
        for size in (8, 16, 8, 16):
            model(images[size])
            assert penalty().item() == pytest.approx(wanted[size], abs=1e-6)


def test_stages_that_change_with_inputs_of_one_size() -> None:
    class Upsampled(Pooled):
        def forward(self, x: Tensor, times: int = 1) -> Tensor:  # type: ignore[override]
            return super().forward(x.repeat_interleave(times, dim=2))

    x, sites = torch.randn(5, 3, 8, 8), ["parts.0", "parts.1", "parts.2"]
    with Penalty(Upsampled(), sites=sites, rows=None, every=1) as penalty:
        model = penalty._models[0]
        model(x)
        penalty()
        model(x, times=2)
        again = penalty().item()
    with Penalty(model, sites=sites, rows=None, every=1) as penalty:
        model(x, times=2)
        assert penalty().item() == again


@pytest.mark.parametrize("rows", [8, None])
def test_only_pairs_that_are_asked_for_are_measured(rows: int | None) -> None:
    """An angle has no gradient between a layer and itself, and beyond a cosine of 1 no value."""
    cka = MEASURES["linear_cka"]
    angle = replace(cka, name="angle", function=lambda view: torch.arccos(cka.function(view)), closer="down")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    x = torch.randn(12, 5)
    with Penalty(model, angle, rows=rows, every=1, pairs="all", weight=1.0) as penalty:
        model(x)
        value = penalty()
        value.backward()
    shown = [x := layer(x) for layer in model]
    truth = sum(
        torch.arccos(cka.of(a[:rows].detach(), b[:rows].detach())) for k, a in enumerate(shown) for b in shown[k + 1 :]
    )
    assert float(value.detach()) == pytest.approx(-2 * float(truth), rel=1e-4)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
