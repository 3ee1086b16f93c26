"""Joint sums equal NumPy's covariances, however the rows are split, ordered and shifted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sosie.stitching.joint import JointSums

PAIRS = [(0, 1), (2, 1), (2, 3)]


def maps(seed: int, channels: int, n: int = 40, positions: int = 9, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n, positions, channels, generator=generator, dtype=torch.float64) @ torch.randn(
        channels, channels, generator=generator, dtype=torch.float64
    )
    return mixed.transpose(1, 2) + offset


def sites(offset: float = 0.0) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    return {0: maps(0, 3, offset=offset), 2: maps(1, 4)}, {1: maps(2, 5, offset=-offset), 3: maps(3, 2)}


def streamed(a: dict[int, Tensor], b: dict[int, Tensor], size: int, products: torch.dtype) -> JointSums:
    total = None
    n = len(next(iter(a.values())))
    for start in range(0, n, size):
        blocks = [{k: x[start : start + size] for k, x in side.items()} for side in (a, b)]
        part = JointSums.of(blocks[0], blocks[1], PAIRS, products, near=total)
        total = part if total is None else total.merge(part)
    assert total is not None
    return total


def expected(x: Tensor, y: Tensor) -> np.ndarray:
    rows = [each.transpose(1, 2).reshape(-1, each.shape[1]).numpy() for each in (x, y)]
    return np.cov(np.hstack(rows), rowvar=False, bias=True)


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_covariances_are_those_of_all_rows(size: int, offset: float) -> None:
    a, b = sites(offset)
    total = streamed(a, b, size, torch.float64)
    assert total.n == 360
    assert set(total.cross) == set(PAIRS)
    for i, j in PAIRS:
        found, p = total.joint(i, j), a[i].shape[1]
        wanted = expected(a[i], b[j])
        for block, part in (
            (found.cov_aa, wanted[:p, :p]),
            (found.cov_ab, wanted[:p, p:]),
            (found.cov_bb, wanted[p:, p:]),
        ):
            np.testing.assert_allclose(block.numpy(), part, atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(found.mean_a.numpy(), a[i].mean((0, 2)).numpy(), rtol=1e-12, atol=1e-12)


def test_parts_with_other_centres_merge_in_any_order() -> None:
    a, b = sites(100.0)
    halves = [
        JointSums.of({k: x[part] for k, x in a.items()}, {k: x[part] for k, x in b.items()}, PAIRS, torch.float64)
        for part in (slice(0, 11), slice(11, 40))
    ]
    one, other = halves[0].merge(halves[1]), halves[1].merge(halves[0])
    assert not torch.equal(one.centre["a", 0], other.centre["a", 0])
    assert torch.allclose(one.joint(0, 1).cov_ab, other.joint(0, 1).cov_ab, atol=1e-11)
    whole = JointSums.of(a, b, PAIRS, torch.float64)
    assert torch.allclose(one.joint(2, 3).cov_ab, whole.joint(2, 3).cov_ab, atol=1e-11)


def test_a_centre_that_is_far_off_is_moved() -> None:
    a, b = sites()
    moved = {0: torch.cat([a[0][:10], a[0][10:] + 1e5]).float(), 2: a[2].float()}
    other = {k: x.float() for k, x in b.items()}
    found = streamed(moved, other, 10, torch.float32)
    late = JointSums.of({0: moved[0][10:], 2: moved[2][10:]}, {k: x[10:] for k, x in other.items()}, PAIRS)
    spread = expected(moved[0].double(), other[1].double())[:3, :3]
    np.testing.assert_allclose(found.joint(0, 1).cov_aa.numpy(), spread, rtol=1e-6)
    inside = expected(moved[0][10:].double(), other[1][10:].double())[:3, :3]
    np.testing.assert_allclose(late.joint(0, 1).cov_aa.numpy(), inside, rtol=1e-5, atol=1e-4)


def test_precision_is_the_finer_of_the_two_and_tells_the_tolerance() -> None:
    a, b = sites()
    assert JointSums.of(a, b, PAIRS).joint(0, 1).tolerance == 1e-10
    found = JointSums.of({k: x.float() for k, x in a.items()}, {k: x.float() for k, x in b.items()}, PAIRS)
    assert found.joint(0, 1).tolerance == 1e-6


def test_rows_must_be_paired() -> None:
    a, b = sites()
    with pytest.raises(ValueError, match="need paired rows, got 180 and 360"):
        JointSums.of({k: x[:20] for k, x in a.items()}, b, PAIRS)


@pytest.mark.parametrize("shape", [(60, 16, 400), (1, 16, 100_000)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_directions_that_are_none_stay_below_the_tolerance_in_float32(
    shape: tuple[int, int, int], offset: float
) -> None:
    """Half the columns are combinations of the others, and the centre of an earlier chunk is off."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape[0], 8, shape[2], generator=generator)
    x = torch.cat([base, torch.einsum("ij,kjs->kis", torch.randn(8, 8, generator=generator), base)], dim=1)
    earlier = JointSums.of({0: x}, {0: x}, [(0, 0)])
    found = JointSums.of({0: x + offset}, {0: x + offset}, [(0, 0)], near=earlier).joint(0, 0)
    size = found.cov_aa.diagonal().sqrt()
    values = torch.linalg.eigvalsh(found.cov_aa / torch.outer(size, size))
    assert float(values[:8].abs().max() / values[-1]) < 0.05 * found.tolerance
    assert float(values[8] / values[-1]) > 10 * found.tolerance
