"""`sosie.Running`: a measure of rows that come batch by batch, in one process and in several."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from paired import correlated_rows
from ranks import run_ranks
from torch import Tensor

import sosie
from sosie.measures import MEASURES
from sosie.stats import PairedRows

STREAMED = [
    "debiased_cka", "kernel_alignment", "svcca(keep=0.9)", "procrustes_angle", "hard_correlation_match", "predictivity",
]  # fmt: skip
WIDE = 1500, 1400  # where `compare` takes Gram matrices of blocks, not covariances
CUTS = {"all": [300], "one by one": [1] * 300, "odd": [7, 130, 0, 3, 160], "blocks": [64] * 4 + [44]}


def compared(x: Tensor, y: Tensor, measure: str) -> float:
    return float(sosie.compare({"x": x}, {"y": y}, measures=measure).matrix(measure)[0, 0])


def updated(measure: str, x: Tensor, y: Tensor, sizes: list[int]) -> sosie.Running:
    running = sosie.Running(measure)
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        running.update(a, b)
    return running


@pytest.mark.parametrize(
    ("measure", "widths"), [*((name, (7, 5)) for name in STREAMED), *((name, WIDE) for name in STREAMED[:2])]
)
def test_it_is_what_compare_gives_however_the_rows_are_cut(measure: str, widths: tuple[int, int]) -> None:
    x, y = correlated_rows(300, *widths)
    expected = compared(x, y, measure)
    for name, sizes in CUTS.items():
        assert updated(measure, x, y, sizes).compute() == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize(
    ("name", "message"),
    [("mean_cca", "mean_cca: . of 7 directions dropped"), ("normalized_bures", "normalized_bures: n=70 < width=90")],
)
def test_compute_warns_of_a_value_that_rows_or_digits_are_too_few_for(name: str, message: str) -> None:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(70, 7 if name == "mean_cca" else 90, dtype=torch.float64, generator=random) for _ in "xy")
    if name == "mean_cca":
        x[0] *= 1e6
    running = sosie.Running(name)
    running.update(x, y)
    with pytest.warns(UserWarning, match=message) as caught:
        running.compute()
    assert caught[0].filename == __file__


def test_it_goes_on_after_a_value_and_starts_anew_after_a_reset() -> None:
    x, y = correlated_rows(300)
    running = updated("debiased_cka", x[:100], y[:100], [50, 50])
    assert running.compute() == pytest.approx(compared(x[:100], y[:100], "debiased_cka"), abs=1e-9)
    running.update(x[100:].numpy(), y[100:].numpy())
    assert running.compute() == pytest.approx(compared(x, y, "debiased_cka"), abs=1e-9)
    assert running.comparison().rows()[0]["n"] == running.n == 300
    running.reset()
    with pytest.raises(ValueError, match="no rows yet"):
        running.compute()
    running.update(x[:, :3], y)
    assert running.n == 300


def test_rows_may_be_overwritten_after_an_update() -> None:
    x, y = correlated_rows(100)
    running, buffer = sosie.Running("debiased_cka"), torch.empty(50, x.shape[1], dtype=x.dtype)
    for a, b in zip(x.split(50), y.split(50), strict=True):
        running.update(buffer.copy_(a), b)
    assert running.compute() == pytest.approx(compared(x, y, "debiased_cka"), abs=1e-9)


@pytest.mark.parametrize("widths", [(7, 5), WIDE])
@pytest.mark.parametrize("cut", [0, 30, 150, 192])
def test_two_that_are_merged_are_one_of_all_rows(widths: tuple[int, int], cut: int) -> None:
    x, y = correlated_rows(300, *widths)
    one, other = (updated("debiased_cka", a, b, [len(a)]) for a, b in ((x[:cut], y[:cut]), (x[cut:], y[cut:])))
    both = one + other
    # Both have cut blocks already: only where the first ends with a block are they those of all rows.
    within = 1e-9 if widths == (7, 5) or cut % 64 == 0 else 1e-3
    assert both.compute() == pytest.approx(compared(x, y, "debiased_cka"), abs=within)
    assert (one.n, other.n, both.n) == (cut, 300 - cut, 300)


@pytest.mark.parametrize("n", [0, 40, 300])
@pytest.mark.parametrize("widths", [(7, 5), WIDE])
def test_its_state_can_be_saved(n: int, widths: tuple[int, int]) -> None:
    x, y = correlated_rows(400, *widths)
    file = io.BytesIO()
    torch.save(updated("debiased_cka", x[:n], y[:n], [n]).state_dict(), file)
    file.seek(0)
    again = sosie.Running("debiased_cka")
    again.load_state_dict(torch.load(file, weights_only=True))
    again.to("cpu").update(x[n:], y[n:])
    assert again.compute() == pytest.approx(compared(x, y, "debiased_cka"), abs=1e-9)
    with pytest.raises(ValueError, match="state is of debiased_cka, not of linear_cka"):
        sosie.Running("linear_cka").load_state_dict(again.state_dict())


def test_what_cannot_be_streamed_is_named() -> None:
    of_rows = [m.name for m in MEASURES.values() if m.reads is PairedRows]
    assert "mutual_knn" in of_rows
    for name in of_rows:
        with pytest.raises(ValueError, match=rf"{name} reads the rows themselves, so it cannot be streamed"):
            sosie.Running(name)
    with pytest.raises(ValueError, match=r"wcka: of weights, without data; use compare_weights"):
        sosie.Running("wcka")
    with pytest.raises(TypeError, match="a measure is given by its name, got list"):
        sosie.Running(["linear_cka"])  # type: ignore[arg-type]
    wide = torch.randn(8, 20_000)
    with pytest.raises(ValueError, match=r"mean_cca of 20000 and 20000 neurons would take covariances"):
        sosie.Running("mean_cca").update(wide, wide)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ones(4), np.ones((4, 2)), r"x must be \(n, p\), got shape \(4,\)"),
        (np.ones((4, 2)), np.ones((3, 2)), "need paired rows, got 4 and 3"),
        (np.ones((4, 2)), np.full((4, 2), np.nan), "y has values that are NaN"),
        (np.ones((4, 2)), np.full((4, 2), 1e200), r"largest number in y is 1e\+200"),
        (np.ones((4, 3)), np.ones((4, 2)), r"widths \(2, 2\), these have \(3, 2\)"),
    ],
)
def test_bad_rows_are_an_error_and_do_not_count(x: Any, y: Any, words: str) -> None:
    good = torch.randn(70, 2, generator=torch.Generator().manual_seed(0))
    running = updated("linear_cka", good, good.flip(0), [70])
    before = running.compute()
    with pytest.raises(ValueError, match=words):
        running.update(x, y)
    assert running.compute() == before


def test_a_value_that_is_undefined_is_an_error_with_the_reason() -> None:
    running = sosie.Running("linear_cka")
    running.update(torch.ones(70, 3), torch.randn(70, 3))
    with pytest.raises(ValueError, match=r"linear_cka is undefined: features do not vary"):
        running.compute()


# Outputs


def logits(n: int = 300, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(n, classes, generator=random)
    return x, x + torch.randn(n, classes, generator=random), torch.randint(classes, (n,), generator=random)


@pytest.mark.parametrize("measure", ["agreement", "jensen_shannon", "accuracy_difference", "output_rmse"])
@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
def test_outputs_are_those_of_compare_outputs(measure: str, sizes: list[int]) -> None:
    x, y, labels = logits()
    kind = "regression" if measure == "output_rmse" else "logits"
    given = labels if measure == "accuracy_difference" else None
    running = sosie.Running(measure, kind=kind)
    for a, b, right in zip(x.split(sizes), y.split(sizes), labels.split(sizes), strict=True):
        running.update(a, b, None if given is None else right)
    whole = sosie.compare_outputs(x, y, labels=given, measures=measure, kind=kind)
    assert running.compute() == pytest.approx(sosie.measure(measure, x, y, labels=given, kind=kind), abs=1e-9)
    found, expected = running.comparison().rows()[0], whole.rows()[0]
    for name in ("value", "n", "low", "high", "null"):
        assert found[name] == pytest.approx(expected[name], abs=1e-9), name


def test_outputs_merge_and_are_saved() -> None:
    x, y, labels = logits()
    one, other = sosie.Running("bad_churn"), sosie.Running("bad_churn")
    one.update(x[:100].numpy(), y[:100].numpy(), labels[:100])
    again = sosie.Running("bad_churn")
    again.load_state_dict(one.state_dict())
    other.update(x[100:], y[100:], labels[100:])
    assert (again + other).compute() == pytest.approx(sosie.measure("bad_churn", x, y, labels=labels), abs=1e-12)
    with pytest.raises(ValueError, match="bad_churn: it needs labels"):
        other.update(x, y)
    with pytest.raises(TypeError, match="compares rows, not outputs: it takes no labels"):
        sosie.Running("linear_cka").update(x, y, labels)
    assert other.n == 200


def of_this_rank(rows: int) -> float:
    """Each process has other rows; the second of three has none."""
    rank = torch.distributed.get_rank()
    x, y = correlated_rows(600, rows, rows)
    running = sosie.Running("debiased_cka")
    if rank != 1 or torch.distributed.get_world_size() == 2:
        part = slice(0, 256) if rank == 0 else slice(256, 600)
        running.update(x[part], y[part])
    with sosie.engine.single_process():
        assert not running.n or np.isfinite(running.compute())
    return running.compute()


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "get_group_store"), reason="torch is too old")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("width", [6, 1200])
def test_several_processes_merge_their_rows_in_their_order(ranks: int, width: int) -> None:
    expected = compared(*correlated_rows(600, width, width), "debiased_cka")
    assert run_ranks(ranks, of_this_rank, width) == pytest.approx([expected] * ranks, abs=1e-9)


def of_another_measure() -> str:
    running = sosie.Running("linear_cka" if torch.distributed.get_rank() else "debiased_cka")
    try:
        running.compute()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "get_group_store"), reason="torch is too old")
def test_processes_with_other_measures_are_told_so() -> None:
    found = run_ranks(2, of_another_measure)
    assert all("linear_cka in rank 1. Make the same Running in every process" in text for text in found)


def test_it_can_be_pickled() -> None:
    x, y = correlated_rows(200, 6, 6)
    running = updated("svcca(keep=0.9)", x, y, [200])
    assert pickle.loads(pickle.dumps(running)).compute() == running.compute()
