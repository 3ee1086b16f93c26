"""The plan takes the cheapest statistic that fits, and says what it gave up."""

from __future__ import annotations

import pytest
import torch

from sosie.engine.plan import MEMORY, Request, make_plan, parse_size, sample_bytes, size_text
from sosie.measures import find


def plan(names: list[str], a: list[int], b: list[int], rows: int | None = None, **kwargs):
    request = Request(tuple(find(name) for name in names), **kwargs)
    return make_plan(request, (tuple(a), tuple(b)), rows, budget=MEMORY)


def test_narrow_sites_get_exact_moments() -> None:
    found = plan(["debiased_cka", "mean_cca"], [64, 128], [64])
    assert found.kinds == {"debiased_cka": "moments", "mean_cca": "moments"}
    assert found.products == torch.float64
    assert plan(["debiased_cka"], [64], [64]).products == torch.float32


def test_wide_sites_get_blocks() -> None:
    assert plan(["debiased_cka", "linear_cka"], [16384], [16384]).kinds == {
        "debiased_cka": "grams",
        "linear_cka": "grams",
    }
    assert not plan(["debiased_cka"], [16384], [16384]).uncentred
    assert plan(["kernel_alignment"], [16384], [16384]).uncentred


def test_covariances_that_do_not_fit_fall_back_to_rows_and_say_so() -> None:
    found = plan(["procrustes_angle"], [30000], [30000])
    assert found.kinds == {"procrustes_angle": "sample"}
    assert "60.3 GiB" in found.notes["procrustes_angle"]
    assert found.widest is None
    few = plan(["mean_cca"], [4000], [4000], rows=500)
    assert few.kinds == {"mean_cca": "sample"}
    assert few.notes == {}


def test_rows_that_are_too_wide_are_projected() -> None:
    found = plan(["mutual_knn"], [800_000] * 20, [800_000] * 20)
    assert found.widest is not None
    assert found.widest >= 2048
    bytes_needed = sample_bytes(((found.widest,) * 20,) * 2, found.sample_rows)
    assert bytes_needed <= 4 * 2**30


def test_sizes() -> None:
    assert [parse_size(s) for s in (None, 5, "5", "2kB", "2KiB", "1.5GiB")] == [
        None,
        5,
        5,
        2000,
        2048,
        3 * 2**29,
    ]
    assert size_text(3 * 2**29) == "1.5 GiB"
    for bad in ("many", "-3GB", 0):
        with pytest.raises(ValueError, match="memory"):
            parse_size(bad)
