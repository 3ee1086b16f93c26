"""What measures make of all pairs of sites at once is what they make of each pair alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from sosie.engine import evaluate
from sosie.engine.evaluate import by_pair
from sosie.measures import MEASURES, Measure, find
from sosie.stats import Covariances, PairedRows, Sample, Shuffle, row_grams
from sosie.stats.views import Subspace

SLOW = ("rtd",)  # which takes seconds per pair and needs an optional package
OF_PAIRS = [m for m in MEASURES.values() if issubclass(m.reads, (Covariances, PairedRows)) and m.name not in SLOW]
OF_PAIRS += map(
    find, ("rbf_cka(debiased=True)", "distance_correlation(unbiased=True)", "deconfounded_cka(positive=False)")
)
OF_PAIRS += map(find, ("rsa(compare='kendall')", "rsa(dissimilarity='euclidean', compare='whitened_cosine')"))
OF_PAIRS += map(find, ("svcca(directions=3)", "svcca(keep=1.0)"))
measures = pytest.mark.parametrize("measure", OF_PAIRS, ids=lambda m: m.name)
Rows = list[Tensor]


def made(n: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Rows, Rows, Tensor]:
    """Sites with fewer and with more neurons than rows, of low rank, with repeated, dead and nearly equal neurons."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    inputs = normal(n, 6)

    def site(width: int) -> Tensor:
        return inputs @ normal(6, width) + normal(n, width) * torch.linspace(0.01, 2, width) + normal(width)

    few, many = site(n // 4), site(3 * n)
    low = normal(n, 3) @ normal(3, n // 2)
    repeated = torch.cat([few, few[:, :2], torch.ones(n, 1), few[:, :1] + 1e-7 * normal(n, 1)], 1)
    xs, ys = [few, site(2 * n // 3), many, repeated], [site(2 * n // 3), low, few @ normal(n // 4, n // 4), site(n - 1)]
    return [x.to(dtype) for x in xs], [y.to(dtype) for y in ys], inputs.to(dtype)


def values(measure: Measure, sample: Sample, *defined: list[bool]) -> tuple[np.ndarray, dict[tuple[int, int], str]]:
    shape = len(sample.xs), len(sample.ys)
    masks = [np.array(each) for each in defined or ([True] * shape[0], [True] * shape[1])]
    pairs = by_pair([measure], sample, sample.widths, *masks)[measure.name]
    return pairs.matrix(shape).numpy(), pairs.undefined


@measures
@pytest.mark.parametrize(("n", "dtype"), [(40, torch.float64), (24, torch.float32)])
def test_the_grid_is_each_pair(measure: Measure, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_grams, "ENTRIES", 100)
    monkeypatch.setattr(row_grams, "STRIP", 16)
    xs, ys, inputs = made(n, seed=n, dtype=dtype)
    shuffle = Shuffle.draw(n, 0, 0, torch.device("cpu"))
    sample = Sample.of(xs, ys, inputs=inputs)
    for shuffled in (False, True):
        found, undefined = values(measure, sample.shuffled(shuffle) if shuffled else sample)
        for i, j in itertools.product(range(len(xs)), range(len(ys))):
            pair = Sample.of(xs[i], ys[j], inputs=inputs)
            alone, why = values(measure, pair.shuffled(shuffle) if shuffled else pair)
            assert undefined.get((i, j)) == why.get((0, 0))
            np.testing.assert_allclose(
                found[i, j], alone[0, 0], rtol=1e-12, atol=1e-12, err_msg=f"{measure.name} {i} {j}"
            )


@measures
def test_a_constant_site_leaves_the_others_as_they_are(measure: Measure) -> None:
    xs, ys, inputs = made(24, seed=1)
    without, reasons = values(measure, Sample.of(xs, ys, inputs=inputs))
    constant = torch.ones(24, 5, dtype=torch.float64)
    sample = Sample.of([xs[0], constant, *xs[1:]], [*ys, constant], inputs=inputs)
    found, undefined = values(measure, sample, [True, False, True, True, True], [True, True, True, True, False])
    np.testing.assert_allclose(found[[0, 2, 3, 4], :4], without, rtol=1e-12, atol=1e-12)
    assert np.isnan(found[1]).all()
    assert np.isnan(found[:, 4]).all()
    assert sorted(undefined.values()) == sorted(reasons.values())


@pytest.mark.parametrize(
    "measure", [m for m in OF_PAIRS if m.all_pairs and "kendall" not in m.name], ids=lambda m: m.name
)
def test_measures_that_declare_it_take_all_pairs_at_once(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys, inputs = made(24, seed=2)
    monkeypatch.setattr(evaluate, "view_of", None)
    found, undefined = values(measure, Sample.of(xs[:2], ys[:2], inputs=inputs))
    assert np.isfinite(found).all()
    assert not undefined


@pytest.mark.parametrize(
    ("n", "k", "l"), [(30, 4, 7), (30, 20, 14), (30, 14, 20), (30, 25, 28), (30, 29, 3), (30, 29, 29)]
)
def test_cosines_between_spaces_by_their_complements(n: int, k: int, l: int) -> None:
    random = np.random.default_rng(0)

    def space(width: int) -> Subspace:
        centred = random.normal(size=(n, width))
        return Subspace(torch.from_numpy(np.linalg.qr(centred - centred.mean(0))[0]))

    x, y = space(k), space(l)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    for rows, given in ((y.columns, None), (y.columns[order], order)):
        truth = np.linalg.svd((x.columns.T @ rows).numpy(), compute_uv=False)
        assert float(x.cosines(y, given)) == pytest.approx(truth.sum(), abs=1e-12)
        assert (truth[: x.in_common(y)] > 1 - 1e-12).all()
