"""What two models answer: truth in float64, slices, padding, places, labels, intervals, merging."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sosie.diffing import answers
from sosie.diffing.answers import AnswerSums, divergence
from sosie.engine.outputs import next_tokens
from sosie.results.diff import OutputDiff
from sosie.stats import IGNORED
from sosie.stats.grams import by_group


def logits(*shape: int, seed: int = 0, change: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = 2 * torch.randn(*shape, generator=generator)
    return a, a + change * torch.randn(*shape, generator=generator)


def rows(sums: AnswerSums) -> dict[str, OutputDiff]:
    return {row.measure: row for row in sums.result()}


def divergences(a: Tensor, b: Tensor) -> np.ndarray:
    logs = []
    for x in (a.double().numpy(), b.double().numpy()):
        x = x - x.max(-1, keepdims=True)
        logs.append(x - np.log(np.exp(x).sum(-1, keepdims=True)))
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)


def test_numbers_are_those_of_float64_with_padding_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = logits(40, 7, 11)
    keep = torch.ones(40, 7)
    keep[::3, 4:] = 0
    b[0, 5] += 10 * torch.arange(11)  # padding, which would be the largest
    ids = torch.randint(11, (40, 7), generator=torch.Generator().manual_seed(2))
    labels = next_tokens(ids, keep)
    monkeypatch.setitem(answers.SLICE, "cpu", 50)
    sums = AnswerSums()
    for start in range(0, 40, 16):
        part = slice(start, start + 16)
        sums.add(a[part], b[part], keep[part], labels[part], start)
    found = rows(sums)
    kept = keep.bool()
    kl = divergences(a, b)
    assert found["kl_divergence"].value == pytest.approx(kl[kept.numpy()].mean(), rel=1e-5)
    assert found["kl_median"].value == pytest.approx(np.median(kl[kept.numpy()]), rel=0.03)
    assert found["kl_99"].value == pytest.approx(np.quantile(kl[kept.numpy()], 0.99, method="inverted_cdf"), rel=0.012)
    where = np.unravel_index(np.where(kept, kl, 0).argmax(), kl.shape)
    assert found["kl_largest"].value == pytest.approx(kl[where], rel=1e-5)
    place = found["kl_largest"].at
    assert place is not None
    assert (place.input, *place.index) == where
    equal = a.argmax(-1) == b.argmax(-1)
    assert found["agreement"].value == pytest.approx(float(equal[kept].double().mean()), rel=1e-12)
    marked = labels != IGNORED
    assert marked.sum() == (kept[:, 1:] & kept[:, :-1]).sum()
    log_a, log_b = (
        torch.log_softmax(x.double(), -1).gather(-1, labels.clamp_min(0)[..., None])[..., 0][marked] for x in (a, b)
    )
    change = log_b.exp() - log_a.exp()
    assert found["probability_change"].value == pytest.approx(float(change.mean()), rel=1e-5)
    assert found["probability_drop"].value == pytest.approx(float(-change.min()), rel=1e-5)
    assert found["perplexity_ratio"].value == pytest.approx(float((log_a.mean() - log_b.mean()).exp()), rel=1e-5)


def test_the_same_answers_have_no_divergence() -> None:
    a, _ = logits(50, 9)
    sums = AnswerSums()
    sums.add(a, a + 3, labels=torch.arange(50) % 9)
    found = rows(sums)
    assert found["kl_divergence"].value < 1e-12
    assert found["agreement"].value == 1
    assert found["perplexity_ratio"].value == pytest.approx(1, rel=1e-6)
    assert found["kl_largest"].at is not None
    assert found["kl_largest"].at.index == ()
    sums = AnswerSums()
    sums.add(a, a, labels=torch.arange(50) % 9)
    assert str(rows(sums)["probability_drop"].value) == "0.0"  # and not −0


@pytest.mark.parametrize("change", [1e-6, 1e-4, 1e-2, 0.1, 3.0, 40.0])
def test_divergences_are_those_of_float64(change: float) -> None:
    """Down to what rounds away of logits; and with rows that have all sizes of change at once."""
    a, b = logits(64, 500, change=change)
    a, b = 5 * a, 5 * a + (b - a)
    b[::5] = a[::5] + 10 * (b - a)[::5]
    b[::7] = a[::7]
    found, truth = divergence(a, b), torch.tensor(divergences(a, b))
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=2e-14)
    torch.testing.assert_close(found.mean(), truth.mean(), rtol=1e-4, atol=2e-14)
    torch.testing.assert_close(divergence(a.double(), b.double()), truth, rtol=1e-9, atol=2e-14)


def test_intervals_are_by_inputs_not_by_tokens() -> None:
    """Tokens that repeat one prediction add little, and nothing where all are equal."""
    a, b = logits(300, 1, 6)
    single, repeated = AnswerSums(), AnswerSums()
    single.add(a, b)
    repeated.add(a.expand(300, 20, 6), b.expand(300, 20, 6))
    one, many = rows(single)["agreement"], rows(repeated)["agreement"]
    assert one.low is not None
    assert one.high is not None
    assert (many.low, many.high) == pytest.approx((one.low, one.high), abs=0.15 * (one.high - one.low))
    few = AnswerSums()
    few.add(a[:3].expand(3, 20, 6), a[:3].expand(3, 20, 6))
    assert (rows(few)["agreement"].low, rows(few)["agreement"].high) == pytest.approx((0.025 ** (1 / 3), 1))
    assert rows(few)["kl_divergence"].low is None


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_the_interval_of_agreement_covers_where_tokens_go_together(share: float) -> None:
    """In half the inputs the tokens agree or differ all together, in the others by themselves."""
    draw = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(300):
        inputs, tokens = 60, 8
        own = torch.rand(inputs, tokens, generator=draw) < share
        together = torch.rand(inputs, 1, generator=draw) < share
        equal = torch.where(torch.rand(inputs, 1, generator=draw) < 0.5, own, together).double().sum(1)
        groups = torch.arange(inputs) % 32
        sums = {"equal": by_group(equal, groups), "n": by_group(torch.full((inputs,), float(tokens)), groups).double()}
        found = AnswerSums(sums, inputs=inputs)._agreement()
        assert found.low is not None
        assert found.high is not None
        held += found.low <= share <= found.high
    assert held >= 0.93 * 300


def test_nan_is_counted_with_its_place_and_left_out() -> None:
    a, b = logits(20, 3, 5)
    b[7, 2, 1] = math.nan
    sums = AnswerSums()
    sums.add(a, b, first_input=100)
    first = sums.result()[0]
    assert first.measure == "undefined"
    assert first.value == 1
    assert first.at is not None
    assert (first.at.input, first.at.index) == (107, (2,))
    assert "NaN in B alone" in first.meaning
    assert sums.n == 59
    assert math.isfinite(rows(sums)["kl_divergence"].value)


def test_a_forbidden_class_is_infinitely_far() -> None:
    a, b = logits(20, 5)
    b[3, 1] = -math.inf
    sums = AnswerSums()
    sums.add(a, b)
    found = rows(sums)
    assert found["kl_largest"].value == math.inf
    assert found["kl_largest"].at is not None
    assert found["kl_largest"].at.input == 3
    assert math.isfinite(found["kl_median"].value)
    both = AnswerSums()
    a[3, 1] = -math.inf
    both.add(a, b)
    assert math.isfinite(rows(both)["kl_largest"].value)


@pytest.mark.parametrize("width", [10, 128, 300])
def test_the_first_of_equal_logits_is_chosen(width: int) -> None:
    x = torch.randint(0, 3, (50, width), generator=torch.Generator().manual_seed(0)).float()
    x[0], x[1] = -torch.inf, torch.arange(width)
    most, place = answers._largest(x)
    assert most.tolist() == x.amax(1).tolist()
    assert place.tolist() == [row.index(max(row)) for row in x.tolist()]
    x[2, width - 1] = torch.nan
    assert bool(answers._largest(x)[0][2].isnan())
