"""Every measure of outputs keeps the laws it declares, and breaks those it does not; the laws can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_laws import transformed
from torch import Tensor

from sosie.measures import MEASURES, Measure
from sosie.measures.define import TRANSFORMATIONS
from sosie.stats import Differences, OutputSums
from sosie.stats.sampling import dealt_groups

OF_OUTPUTS = [measure for measure in MEASURES.values() if measure.reads_outputs]
measures = pytest.mark.parametrize("measure", OF_OUTPUTS, ids=lambda m: m.name)


def answers(n: int = 120, width: int = 4, seed: int = 0, common: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Two models' outputs (n, width) that have something in common, and labels that both often get right."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(width, (n,), generator=random)
    shared = torch.nn.functional.one_hot(labels, width) + torch.randn(n, width, generator=random, dtype=torch.float64)
    x, y = (common * shared + torch.randn(n, width, generator=random, dtype=torch.float64) for _ in range(2))
    return x, y, labels


def kind_of(measure: Measure) -> str:
    return "regression" if issubclass(measure.reads, Differences) else "logits"


def sums_of(measure: Measure, x: Tensor, y: Tensor, labels: Tensor, start: int = 0) -> OutputSums:
    return OutputSums.of(x, y, labels=labels, kind=kind_of(measure), start=start)


def value_of(measure: Measure, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return measure.of(x, y, labels=labels, kind=kind_of(measure))


def check_invariance(measure: Measure, x: Tensor, y: Tensor, labels: Tensor, how: str) -> None:
    before = value_of(measure, x, y, labels)
    after = [value_of(measure, transformed(x, how), y, labels), value_of(measure, x, transformed(y, how), labels)]
    moved = max(float((value - before).abs()) for value in after)
    if how in measure.invariant:
        assert moved < 1e-12, f"{measure.name} under {how} moved by {moved}"
    else:
        assert moved > 1e-4, f"{measure.name} under {how} did not move, but does not declare that"


def check_symmetry(measure: Measure, x: Tensor, y: Tensor, labels: Tensor) -> None:
    gap = float((value_of(measure, x, y, labels) - value_of(measure, y, x, labels)).abs())
    assert (gap < 1e-12) == measure.symmetric, f"{measure.name} differs by {gap} when sides are swapped"


def check_bounds(measure: Measure, value: float) -> None:
    low, high = measure.bounds
    assert low is None or value >= low - 1e-12, f"{measure.name} = {value} is below {low}"
    assert high is None or value <= high + 1e-12, f"{measure.name} = {value} is above {high}"


def check_same(measure: Measure, x: Tensor, labels: Tensor) -> None:
    value = float(value_of(measure, x, x.clone(), labels))
    assert value == pytest.approx(measure.same, abs=1e-12), f"{measure.name} of outputs with themselves is {value}"


@measures
def test_outputs_with_themselves(measure: Measure) -> None:
    x, _, labels = answers()
    check_same(measure, x, labels)


@measures
def test_invariant_exactly_where_declared(measure: Measure) -> None:
    for how in TRANSFORMATIONS:
        check_invariance(measure, *answers(), how)


@measures
def test_symmetric_exactly_where_declared(measure: Measure) -> None:
    check_symmetry(measure, *answers())


@measures
@given(n=st.integers(20, 60), width=st.integers(2, 6), seed=st.integers(0, 99), common=st.floats(0, 2))
@settings(max_examples=25, deadline=None)
def test_stays_within_its_bounds(measure: Measure, n: int, width: int, seed: int, common: float) -> None:
    x, y, labels = answers(n, width, seed, common)
    try:
        value = float(value_of(measure, x, y, labels))
    except ValueError:
        reject()  # a model that makes no errors, among so few inputs
    check_bounds(measure, value)


@measures
def test_alike_is_closer_than_unrelated(measure: Measure) -> None:
    x, _, labels = answers()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    near, far = value_of(measure, x, x + 0.1 * noise, labels), value_of(measure, x, noise, labels)
    assert (near > far) if measure.closer == "up" else (near < far)


@measures
def test_split_and_order_do_not_matter(measure: Measure) -> None:
    x, y, labels = answers(n=90)
    whole = float(value_of(measure, x, y, labels))
    cuts = ((60, 90), (0, 37), (37, 38), (38, 60))
    parts = [sums_of(measure, x[a:b], y[a:b], labels[a:b], start=a) for a, b in cuts]
    merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
    assert float(measure.from_outputs(merged)) == pytest.approx(whole, abs=1e-12)
    at_once = sums_of(measure, x, y, labels)
    for pieces in (merged, parts[3].merge(parts[2]).merge(parts[0]).merge(parts[1])):
        without = measure.from_outputs(pieces, jackknife=True)
        assert without.tolist() == pytest.approx(measure.from_outputs(at_once, jackknife=True).tolist(), abs=1e-12)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    assert float(value_of(measure, x[order], y[order], labels[order])) == pytest.approx(whole, abs=1e-12)


@measures
def test_leaving_out_a_group_is_leaving_out_its_inputs(measure: Measure) -> None:
    x, y, labels = answers(n=100)
    without = measure.from_outputs(sums_of(measure, x, y, labels), jackknife=True)
    for group in (0, 3, 31):
        kept = dealt_groups(torch.arange(100), 32) != group
        direct = value_of(measure, x[kept], y[kept], labels[kept])
        assert float(without[group]) == pytest.approx(float(direct), abs=1e-12)


@measures
def test_float32_is_near_float64(measure: Measure) -> None:
    x, y, labels = answers()
    single, double = value_of(measure, x.float(), y.float(), labels), value_of(measure, x, y, labels)
    assert float(single) == pytest.approx(float(double), abs=1e-6)


@measures
def test_gradient_is_finite_and_right(measure: Measure) -> None:
    x, y, labels = answers(n=20)
    if not measure.differentiable:
        pytest.skip("declared as not differentiable")
    x.requires_grad_(True)
    value_of(measure, x, y, labels).backward()
    assert x.grad is not None
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    step = 1e-6
    with torch.no_grad():
        ends = [value_of(measure, x + sign * step * direction, y, labels) for sign in (1, -1)]
    assert float((x.grad * direction).sum()) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-4)
    same = x.detach().clone().requires_grad_(True)
    value_of(measure, same, x.detach().clone(), labels).backward()
    assert same.grad is not None
    assert torch.isfinite(same.grad).all()


@measures
def test_facts_are_complete(measure: Measure) -> None:
    facts = measure.facts()
    assert facts["summary"].strip()
    assert facts["paper"]
    assert facts["cost"]
    assert facts["chance"]
    assert measure.function.__name__ == measure.name
    if measure.name.endswith(("difference", "disagreement", "churn", "rmse", "jensen_shannon")):
        assert measure.closer == "down"
    else:
        assert measure.closer == "up"


# The laws can fail


def test_invariance_and_symmetry_can_fail() -> None:
    with pytest.raises(AssertionError, match="agreement under shift"):
        check_invariance(replace(MEASURES["agreement"], invariant=frozenset({"shift"})), *answers(), "shift")
    with pytest.raises(AssertionError, match="did not move"):
        check_invariance(replace(MEASURES["agreement"], invariant=frozenset()), *answers(), "scale")
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["bad_churn"], symmetric=True), *answers())
    with pytest.raises(AssertionError, match="sides are swapped"):
        check_symmetry(replace(MEASURES["churn"], symmetric=False), *answers())


def test_bounds_and_same_can_fail() -> None:
    x, _, labels = answers()
    with pytest.raises(AssertionError, match="is above"):
        check_bounds(replace(MEASURES["agreement"], bounds=(0, 0.1)), 0.5)
    with pytest.raises(AssertionError, match="with themselves"):
        check_same(replace(MEASURES["agreement"], same=0.0), x, labels)
