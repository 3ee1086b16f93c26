"""Every measure keeps the laws it declares, and breaks those it does not; the laws themselves can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired import correlated_rows
from torch import Tensor

from sosie.measures import MEASURES, Measure, find
from sosie.measures.define import TRANSFORMATIONS, FewRows
from sosie.stats import (
    Alignment,
    Covariances,
    DebiasedAlignment,
    Grams,
    Moments,
    Neurons,
    Sample,
    SplitMaker,
    SplitMoments,
    Splits,
    dealt_folds,
)

PACKAGES = {"rtd": "ripser"}  # measures that need an optional package

# Measures of outputs take no rows of neurons; test_output_laws.py has theirs, test_difference_laws.py those of measures
# that compare entry by entry, and test_stochastic.py those of repeated responses.
OF_ROWS = [m for m in MEASURES.values() if m.reads_layers]
# Options that change facts.
OF_ROWS += map(
    find,
    (
        "rbf_cka(width=9.0)",
        "rbf_cka(debiased=True)",
        "laplace_cka(width=9.0, debiased=True)",
        "polynomial_cka(gamma=0.01)",
    ),
)
measures = pytest.mark.parametrize("measure", OF_ROWS, ids=lambda m: m.name)


def transformed(rows: Tensor, how: str) -> Tensor:
    random = torch.Generator().manual_seed(5)
    width = rows.shape[1]
    square = torch.randn(width, width, generator=random, dtype=rows.dtype)
    if how == "permutation":
        return rows.flip(1)
    if how == "stretch":
        return rows * torch.linspace(0.3, 2, width, dtype=rows.dtype)
    if how == "rotation":
        return rows @ torch.linalg.qr(square).Q
    if how == "linear":
        return rows @ (square + 2 * torch.eye(width, dtype=rows.dtype))
    if how == "scale":
        return 3.7 * rows
    return rows + 2 * torch.randn(width, generator=random, dtype=rows.dtype)


def value_of(measure: Measure, x: Tensor, y: Tensor, order: Tensor | None = None) -> Tensor:
    """The value, with what else the measure needs, and widths it can compare."""
    if measure.base in PACKAGES:
        pytest.importorskip(PACKAGES[measure.base])
    if measure.same_width:
        width = min(x.shape[1], y.shape[1])
        x, y = x[:, :width], y[:, :width]
    if measure.reads is Splits and order is not None:  # rows in another order stay in their folds
        folds = dealt_folds(torch.arange(len(x)), **measure.folds)
        return measure.from_sample(replace(Sample.of(x, y), split=folds[order]))
    inputs = None
    if "inputs" in measure.needs:
        random = torch.Generator().manual_seed(9)
        inputs = torch.randn(len(x), 5, generator=random, dtype=torch.float64).to(x.dtype)
        inputs = inputs if order is None else inputs[order]
    try:
        return measure.of(x, y, inputs=inputs)
    except ImportError as missing:
        pytest.skip(str(missing))


def change(measure: Measure, x: Tensor, y: Tensor, how: str) -> float:
    before = value_of(measure, x, y)
    after = torch.stack([value_of(measure, transformed(x, how), y), value_of(measure, x, transformed(y, how))])
    return float((after - before).abs().max())


def span(measure: Measure) -> float:
    """The unit of tolerances: 1, or the whole range where that is narrower."""
    low, high = measure.bounds
    return 1 if low is None or high is None else min(1, high - low)


def check_invariance(measure: Measure, x: Tensor, y: Tensor, how: str) -> None:
    moved = change(measure, x, y, how)
    if how in measure.invariant:
        assert moved < 1e-8, f"{measure.name} under {how} moved by {moved}"
    else:
        assert moved > 1e-4 * span(measure), f"{measure.name} under {how} did not move, but does not declare that"


def check_symmetry(measure: Measure, x: Tensor, y: Tensor) -> None:
    gap = float((value_of(measure, x, y) - value_of(measure, y, x)).abs())
    assert (gap < 1e-9) == measure.symmetric, f"{measure.name} differs by {gap} when sides are swapped"


def check_pairing(measure: Measure, x: Tensor, y: Tensor) -> None:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(2))
    moved = float((value_of(measure, x, y[order]) - value_of(measure, x, y)).abs())
    needed = moved > (1e-4 * span(measure) if measure.paired else 1e-9)
    assert needed == measure.paired, f"{measure.name} moved by {moved} when the rows of one side were shuffled"


def check_bounds(measure: Measure, value: float) -> None:
    low, high = measure.bounds
    assert low is None or value >= low - 1e-9, f"{measure.name} = {value} is below {low}"
    assert high is None or value <= high + 1e-9, f"{measure.name} = {value} is above {high}"


def check_same(measure: Measure, x: Tensor) -> None:
    # A distance is the root of a difference that rounding leaves at 1e-16.
    if measure.same is None:
        pytest.skip("declared to depend on the rows")
    value = float(value_of(measure, x, x.clone()))
    units = 1.0 if "scale" in measure.invariant else float((x - x.mean(0)).norm())
    assert abs(value - measure.same) < 1e-6 * units, f"{measure.name} of rows with themselves is {value}"


@measures
def test_rows_with_themselves(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    check_same(measure, pair[0])


@measures
def test_invariant_exactly_where_declared(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    for how in TRANSFORMATIONS:
        check_invariance(measure, *pair, how)


@measures
def test_symmetric_exactly_where_declared(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    check_symmetry(measure, *pair)


@measures
def test_needs_pairing_exactly_where_declared(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    check_pairing(measure, *pair)


@measures
@given(
    n=st.integers(14, 40),
    p=st.integers(2, 12),
    q=st.integers(2, 12),
    seed=st.integers(0, 99),
    common=st.floats(0, 1),
)
@settings(max_examples=15, deadline=None)
def test_stays_within_its_bounds(measure: Measure, n: int, p: int, q: int, seed: int, common: float) -> None:
    if measure.few_rows == "infinite":
        n, common = n + p + q, 0.9 * common  # where it has a value
    x, y = correlated_rows(n, p, q, seed)
    narrow = min(p, q)
    y = y.clone()
    y[:, :narrow] = common * x[:, :narrow] + (1 - common) * y[:, :narrow]
    check_bounds(measure, float(value_of(measure, x, y)))


@measures
def test_alike_is_closer_than_unrelated(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    x, _ = pair
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    near, far = value_of(measure, x, x + 0.1 * noise), value_of(measure, x, noise)
    assert (near > far) if measure.closer == "up" else (near < far)


@measures
def test_float32_is_near_float64(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    near = pytest.approx(float(value_of(measure, x, y)), abs=2e-5 * span(measure))
    assert float(value_of(measure, x.float(), y.float())) == near


@measures
def test_gradient_is_finite_and_right(measure: Measure) -> None:
    x, y = correlated_rows(n=20, p=4, q=3)
    if not measure.differentiable:
        pytest.skip("declared as not differentiable")
    x.requires_grad_(True)
    y.requires_grad_(True)
    value_of(measure, x, y).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    # Along one direction, against a central difference.
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    step = 1e-6
    with torch.no_grad():
        slope = (value_of(measure, x + step * direction, y) - value_of(measure, x - step * direction, y)) / (2 * step)
    assert float((x.grad * direction).sum()) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)


@measures
def test_gradient_is_finite_where_both_sides_are_the_same(measure: Measure) -> None:
    if not measure.differentiable:
        pytest.skip("declared as not differentiable")
    x = correlated_rows(n=20, p=4)[0].requires_grad_(True)
    if measure.few_rows == "infinite":
        with pytest.raises(ValueError, match="infinite"):
            value_of(measure, x, x.detach().clone())
        return
    value_of(measure, x, x.detach().clone()).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@measures
@pytest.mark.parametrize("shape", [(20, 4, 3), (10, 30, 20)], ids=["tall", "wide"])
def test_gradient_towards_a_fixed_target_in_float32(measure: Measure, shape: tuple[int, int, int]) -> None:
    if not measure.differentiable:
        pytest.skip("declared as not differentiable")
    x, y = (side.float() for side in correlated_rows(*shape))
    x[:, :2] = 0.5  # dead neurons, whose directions have no order
    x.requires_grad_(True)
    if measure.few_rows == "infinite" and shape[0] <= shape[1] + shape[2]:
        with pytest.raises(ValueError, match="infinite"):
            value_of(measure, x, y)
        return
    value_of(measure, x, y).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@measures
def test_split_and_order_do_not_matter(measure: Measure) -> None:
    x, y = correlated_rows(n=90)
    whole = float(value_of(measure, x, y))
    if issubclass(measure.reads, Alignment | Covariances):
        parts = [Moments.of(x[a:b], y[a:b]) for a, b in ((60, 90), (0, 37), (37, 38), (38, 60))]
        merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
        view = merged.alignment(measure.reads) if issubclass(measure.reads, Alignment) else merged.covariances()
        assert float(measure(view)) == pytest.approx(whole, abs=1e-9)
    if issubclass(measure.reads, Neurons):
        merged = Moments.of(x[60:], y[60:]).merge(Moments.of(x[:60], y[:60]))
        assert float(measure(merged.neurons())) == pytest.approx(whole, abs=1e-9)
    if measure.reads is Splits:
        sides = [SplitMaker(**measure.folds) for _ in range(2)]
        parts = [
            SplitMoments.join(
                *(maker.side([maker.part("", rows[a:b], a)]) for maker, rows in zip(sides, (x, y), strict=True))
            )
            for a, b in ((60, 90), (0, 37), (37, 38), (38, 60))
        ]
        merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
        assert float(measure(merged.splits())) == pytest.approx(whole, abs=1e-9)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    assert float(value_of(measure, x[order], y[order], order)) == pytest.approx(whole, abs=1e-9)


@pytest.mark.parametrize(
    "measure", [m for m in MEASURES.values() if issubclass(m.reads, Alignment)], ids=lambda m: m.name
)
def test_one_block_of_grams_is_exact(measure: Measure, pair: tuple[Tensor, Tensor]) -> None:
    grams = Grams.of(*pair, block=64)
    assert float(measure(grams.alignment(measure.reads))) == pytest.approx(float(value_of(measure, *pair)), abs=1e-12)


@measures
@pytest.mark.parametrize("disturb", ["shift by 100", "scale by 1e6", "float16"])
def test_hard_numbers_give_the_same_answer(measure: Measure, disturb: str) -> None:
    x, y = (side.float() for side in correlated_rows(n=80))
    truth = float(value_of(measure, x.double(), y.double()))
    if disturb == "shift by 100":
        if "shift" not in measure.invariant:
            pytest.skip("a shift changes it, as declared")
        x = x + 100
    elif disturb == "float16":
        x, y = x.half().float(), y.half().float()
    else:
        if "scale" not in measure.invariant:
            pytest.skip("a scale changes it, as declared")
        x = x * float(disturb.rpartition(" ")[2])
    slack = (2e-3 if disturb == "float16" else 1e-4) * span(measure)
    assert float(value_of(measure, x, y)) == pytest.approx(truth, rel=slack, abs=slack)


@pytest.mark.parametrize("measure", [m for m in OF_ROWS if "linear" in m.invariant], ids=lambda m: m.name)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_invariant_to_maps_that_are_nearly_singular(measure: Measure, size: float, pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    far = x + size * x.sum(1, keepdim=True)
    truth = float(value_of(measure, x, y))
    assert float(value_of(measure, far, y)) == pytest.approx(truth, abs=1e-7)
    assert float(value_of(measure, y, far)) == pytest.approx(float(value_of(measure, y, x)), abs=1e-7)


@measures
@pytest.mark.parametrize(
    ("dtype", "scales", "rel"),
    [(torch.float32, (1e20, 1e-25), 1e-4), (torch.float64, (1e150, 1e-150), 1e-9)],
    ids=["float32", "float64"],
)
def test_no_scale_is_too_large_or_small(
    measure: Measure, dtype: torch.dtype, scales: tuple[float, float], rel: float
) -> None:
    """Squares of these leave what the precision holds; a power of 2 is taken off first, or float64 taken."""
    if {"width", "gamma"} & set(measure.options):
        pytest.skip("an option is in the units of the rows")
    x, y = (side.to(dtype) for side in correlated_rows(n=80))
    truth = float(value_of(measure, x, y))
    for scale in scales:
        power = 4 if measure.name == "hsic" else 1  # of the scale, where it is not invariant: name others here
        if abs(power * math.log10(scale)) > 300:
            pytest.skip("float64 does not hold the value")
        value = float(value_of(measure, scale * x, scale * y))
        if "scale" not in measure.invariant:
            value /= scale**power
        assert value == pytest.approx(truth, rel=rel, abs=1e-9), scale


@pytest.mark.parametrize(
    "measure", [m for m in OF_ROWS if m.differentiable and "scale" in m.invariant], ids=lambda m: m.name
)
def test_gradients_at_any_scale(measure: Measure) -> None:
    x, y = (side.float() for side in correlated_rows(n=40, p=5, q=4))
    slopes = []
    for scale in (1.0, 2.0**66, 2.0**-83):
        scaled = (scale * x).requires_grad_(True)
        value_of(measure, scaled, scale * y).backward()
        assert scaled.grad is not None
        slopes.append(scaled.grad.double() * scale)
    for found in slopes[1:]:
        torch.testing.assert_close(found, slopes[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("statistic", [Moments, Grams])
@pytest.mark.parametrize("scale", [2.0**66, 2.0**-83])
def test_sums_of_any_scale_merge(statistic: type[Moments | Grams], scale: float) -> None:
    """In float32 the squares of one part are infinite, or 0."""
    x, y = (side.float() for side in correlated_rows(n=128))
    parts = [statistic.of(scale * x[k : k + 64], scale * y[k : k + 64]) for k in (0, 64)]
    plain = [statistic.of(x[k : k + 64].double(), y[k : k + 64].double()) for k in (0, 64)]
    for kind in (Alignment, DebiasedAlignment):
        found, truth = (lot[0].merge(lot[1]).alignment(kind) for lot in (parts, plain))
        for name in ("xx", "yy", "xy"):
            torch.testing.assert_close(getattr(found, name) / scale**4, getattr(truth, name), rtol=1e-9, atol=0)


def test_sums_say_where_float64_ends() -> None:
    x, y = correlated_rows()
    for statistic in (Moments, Grams):
        with pytest.raises(ValueError, match=r"the largest number in site 0 is .e.10.: its products leave"):
            statistic.of(1e100 * x, y)


@measures
def test_facts_are_complete(measure: Measure) -> None:
    facts = measure.facts()
    assert facts["summary"].strip()
    assert facts["paper"]
    assert facts["cost"]
    assert measure.function.__name__ == measure.name.partition("(")[0]
    if measure.name.endswith(("_distance", "_angle")):
        assert measure.closer == "down"


# Few rows: what more neurons than rows do to the value of rows that have nothing to do with each other


def unrelated(measure: Measure, n: int, p: int, q: int) -> Tensor:
    """The values of a few draws, the nearer to "alike" the higher; in units of the rows where their scale matters.

    Of measures that need no pairing the sides have different spectra.
    """
    values = []
    for seed in range(8):
        random = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(n, width, generator=random, dtype=torch.float64) for width in (p, q))
        if not measure.paired:
            y = y / torch.arange(1, q + 1).sqrt()
        units = 1 if "scale" in measure.invariant or measure.bounds[1] is not None else (x - x.mean(0)).norm()
        values.append(value_of(measure, x, y) / units)
    return torch.stack(values) * (1 if measure.closer == "up" else -1)


def check_few_rows(measure: Measure) -> None:
    """Biased: both more neurons and fewer rows bring the value nearer to that of equal rows.

    Saturates: the value does not depend on the rows at all.
    """
    measure = measure.using(**{name: value for name, value in (("keep", 1.0), ("k", 3)) if name in measure.defaults})
    if measure.few_rows == "infinite":
        with pytest.raises(ValueError, match="infinite"):
            unrelated(measure, 20, 60, 60)
        return
    wide, many, narrow = (unrelated(measure, n, p, p) for n, p in ((20, 60), (200, 60), (20, 4)))
    if not measure.paired:
        moved = float((wide.mean() - many.mean()).abs())
        assert measure.few_rows is None or moved > 0.05, f"{measure.name} moved by {moved} where there are few rows"
        return
    nearer = float(wide.mean() - torch.maximum(many.mean(), narrow.mean()))
    kind = "biased" if nearer > 0.1 * span(measure) else None
    if not measure.same_width:
        of_x, of_y = (bool(unrelated(measure, 20, p, q).std() < 1e-6) for p, q in ((60, 4), (4, 60)))
        kind = {(True, True): "saturates", (True, False): "saturates in x"}.get((of_x, of_y), kind)
    assert kind == measure.few_rows, f"{measure.name} is {kind} where there are few rows"


@measures
def test_few_rows_do_what_is_declared(measure: Measure) -> None:
    if measure.base == "rtd":
        pytest.skip("a sum over rows: more of them give more")
    check_few_rows(measure)


# Chance levels


def independent(n: int, p: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, p, generator=random, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize(("n", "p", "expected"), [(100, 10, 0.0909), (100, 1000, 0.9091), (50, 5000, 0.9901)])
def test_biased_cka_of_independent_rows(n: int, p: int, expected: float) -> None:
    values = [float(MEASURES["linear_cka"].of(*independent(n, p, seed))) for seed in range(5)]
    assert sum(values) / 5 == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("n", "p"), [(100, 10), (100, 1000), (50, 5000)])
def test_debiased_cka_of_independent_rows_is_zero_with_the_stated_spread(n: int, p: int) -> None:
    values = torch.tensor([float(MEASURES["debiased_cka"].of(*independent(n, p, seed))) for seed in range(40)])
    spread = (2 / (n * (n - 3))) ** 0.5
    assert abs(float(values.mean())) < 4 * spread / 40**0.5
    assert 0.6 * spread < float(values.std()) < 1.5 * spread
    assert (values < 0).any(), "values were cut off at 0"


def test_mutual_knn_of_independent_rows() -> None:
    values = [float(MEASURES["mutual_knn"].of(*independent(200, 20, seed))) for seed in range(5)]
    assert sum(values) / 5 == pytest.approx(10 / 199, abs=0.02)


def test_scale_of_features_is_no_part_of_similarity() -> None:
    """An epsilon in the denominator gives 0.035 or 0.25 here."""
    x, _ = correlated_rows()
    for scale in (1e-4, 1e-2):
        assert float(MEASURES["linear_cka"].of(scale * x, scale * x)) == pytest.approx(1, abs=1e-12)
        assert float(MEASURES["debiased_cka"].of((scale * x).float(), (scale * x).float())) == pytest.approx(
            1, abs=1e-6
        )


# The laws can fail


def test_invariance_can_fail(pair: tuple[Tensor, Tensor]) -> None:
    liar = replace(MEASURES["linear_cka"], invariant=frozenset({"linear"}))
    with pytest.raises(AssertionError, match="linear_cka under linear"):
        check_invariance(liar, *pair, "linear")
    modest = replace(MEASURES["linear_cka"], invariant=frozenset())
    with pytest.raises(AssertionError, match="did not move"):
        check_invariance(modest, *pair, "rotation")


def test_symmetry_can_fail(pair: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["pwcca"], symmetric=True), *pair)
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["linear_cka"], symmetric=False), *pair)


def test_pairing_can_fail(pair: tuple[Tensor, Tensor]) -> None:
    for liar in (replace(MEASURES["linear_cka"], paired=False), replace(MEASURES["imd"], paired=True)):
        with pytest.raises(AssertionError, match="were shuffled"):
            check_pairing(liar, *pair)


def test_bounds_and_same_can_fail(pair: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(AssertionError, match="is above"):
        check_bounds(replace(MEASURES["linear_cka"], bounds=(0, 0.1)), 0.5)
    with pytest.raises(AssertionError, match="with themselves"):
        check_same(replace(MEASURES["linear_cka"], same=0.0), pair[0])


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("linear_cka", None),
        ("linear_cka", "saturates"),
        ("debiased_cka", "biased"),
        ("mutual_knn", "biased"),
        ("mean_cca", "biased"),
        ("mean_cca", "saturates in x"),
        ("regression_r2", "saturates"),
        ("magnitude_difference", "biased"),
    ],
)
def test_few_rows_can_fail(name: str, declared: FewRows | None) -> None:
    with pytest.raises(AssertionError, match="where there are few rows"):
        check_few_rows(replace(MEASURES[name], few_rows=declared))


def test_sample_and_moments_agree(pair: tuple[Tensor, Tensor]) -> None:
    for name in ("linear_cka", "debiased_cka", "kernel_alignment"):
        measure = MEASURES[name]
        by_rows, by_sums = (
            Sample.of(*pair).alignment(measure.reads),
            Moments.of(*pair).alignment(measure.reads),
        )
        assert float(measure(by_rows)) == pytest.approx(float(measure(by_sums)), abs=1e-12)
    assert DebiasedAlignment is MEASURES["debiased_cka"].reads
