"""Numbers that belong to an input: the right distributions, and the same in any batch."""

from __future__ import annotations

import math

import pytest
import torch

from sosie.data.draws import derived, in_sphere, normals, poisson, uniforms

MANY = torch.arange(4000)


@pytest.mark.parametrize("draw", [uniforms, normals, in_sphere])
def test_an_input_has_its_own_numbers_in_any_batch(draw) -> None:
    whole = draw(7, torch.arange(10), 5)
    assert torch.equal(draw(7, torch.tensor([8, 3]), 5), whole[[8, 3]])
    assert not torch.equal(draw(8, torch.arange(10), 5), whole)
    assert len(whole.unique()) == 50
    stacked = draw(torch.tensor([[7], [8]]), torch.arange(10).expand(2, 10), 5)
    assert torch.equal(stacked[0], whole)
    assert torch.equal(stacked[1], draw(8, torch.arange(10), 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform_and_independent(dtype: torch.dtype) -> None:
    x = uniforms(1, MANY, 51, dtype).double()
    assert x.dtype == torch.float64
    assert 0 <= float(x.min()) < 1e-4
    assert 1 - 1e-4 < float(x.max()) < 1
    counts = torch.histc(x, 100, 0, 1)
    expected = x.numel() / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 99 + 5 * math.sqrt(2 * 99)
    correlations = torch.corrcoef(x.T) - torch.eye(51)
    assert float(correlations.abs().max()) < 5.5 / math.sqrt(len(MANY))


def test_normals_have_the_moments_of_a_normal() -> None:
    x = normals(2, MANY, 50)
    n = x.numel()
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((x**power).mean()) - moment) < 5 * math.sqrt(spread / n)


def test_points_fill_the_ball() -> None:
    radii = in_sphere(3, MANY, 3).norm(dim=1)
    assert float(radii.max()) <= 1
    assert abs(float((radii**3).mean()) - 0.5) < 5 * math.sqrt(1 / 12 / len(MANY))


@pytest.mark.parametrize("rate", [0.0, 0.3, 4.0, 60.0])
def test_poisson_counts_have_mean_and_variance_of_their_rate(rate: float) -> None:
    counts = poisson(4, MANY, torch.full((len(MANY), 30), rate))
    n = counts.numel()
    assert torch.equal(counts, counts.round())
    assert abs(float(counts.mean()) - rate) <= 5 * math.sqrt(rate / n)
    assert abs(float(counts.var()) - rate) <= 5 * math.sqrt((rate + 2 * rate**2) / n)
    assert abs(float((counts == 0).double().mean()) - math.exp(-rate)) <= 5 * math.sqrt(math.exp(-rate) / n)


def test_derived_seeds_differ() -> None:
    seeds = [int(derived(seed, part)) for seed in range(20) for part in range(20)]
    assert len(set(seeds)) == 400
    assert int(derived(-1, 3)) == int(derived(2**64 - 1, 3))
