"""Groups by average linkage, their agreement, and nearest others."""

from __future__ import annotations

import pytest
import torch

from sosie.linalg import adjusted_rand_index, cluster, clusterings, most_similar


def similarities(seed: int, n: int = 30) -> torch.Tensor:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    return x @ x.T


@pytest.mark.parametrize("count", [1, 2, 5, 29, 30])
def test_groups_are_those_of_scikit_learn(count: int) -> None:
    sklearn = pytest.importorskip("sklearn.cluster")
    for seed in range(4):
        s = similarities(seed)
        theirs = sklearn.AgglomerativeClustering(n_clusters=count, metric="precomputed", linkage="average")
        found = cluster(s, count)
        assert adjusted_rand_index(found, torch.from_numpy(theirs.fit_predict((1 - s).numpy()))) == 1
        assert len(found.unique()) == count
        firsts = [int((found == k).nonzero()[0]) for k in range(count)]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("count", [1, 3, 29])
def test_groups_by_ward_are_those_of_scikit_learn(count: int) -> None:
    sklearn = pytest.importorskip("sklearn.cluster")
    for seed in range(4):
        x = torch.randn(30, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = x / x.norm(dim=1, keepdim=True)
        theirs = sklearn.AgglomerativeClustering(n_clusters=count, linkage="ward").fit_predict(x.numpy())
        (found,) = clusterings(x @ x.T, [count], ward=True)
        assert adjusted_rand_index(found, torch.from_numpy(theirs)) == 1


def test_ties_leave_the_number_of_groups_as_asked() -> None:
    assert sorted(cluster(torch.ones(6, 6), 3).unique().tolist()) == [0, 1, 2]
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2))
    assert cluster(blocks, 2).tolist() == [0, 0, 0, 1, 1]
    assert cluster(torch.ones(1, 1), 1).tolist() == [0]


def test_agreement_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(1)
    for width in (1, 2, 5, 40):
        for _ in range(10):
            a, b = (torch.randint(0, width, (40,), generator=generator) for _ in range(2))
            assert adjusted_rand_index(a, b) == pytest.approx(metrics.adjusted_rand_score(a, b), abs=1e-14)
    alone = torch.arange(5)
    assert adjusted_rand_index(alone, alone) == 1 == adjusted_rand_index(alone * 0, alone * 0 + 7)
    assert adjusted_rand_index(alone, alone * 0) == 0 == metrics.adjusted_rand_score(alone, alone * 0)


def test_the_most_similar_are_others() -> None:
    s = torch.tensor([[1.0, 0.2, 0.9], [0.2, 1.0, 0.2], [0.9, 0.2, 1.0]])
    assert most_similar(s, 1).tolist() == [[2], [0], [0]]
    assert most_similar(s, 2).tolist() == [[2, 1], [0, 2], [0, 1]]
    assert torch.equal(s.diagonal(), torch.ones(3))
    assert most_similar(s - 1, 1).tolist() == [[2], [0], [0]]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"all pairs, \(N, N\), got \(2, 3\)"):
        cluster(torch.ones(2, 3), 1)
    with pytest.raises(ValueError, match="3 items cannot be put into 4 groups"):
        cluster(torch.ones(3, 3), 4)
    with pytest.raises(ValueError, match="2 similarities are NaN"):
        most_similar(torch.tensor([[1.0, torch.nan], [torch.nan, 1.0]]), 1)
    with pytest.raises(ValueError, match="not symmetric"):
        cluster(torch.tensor([[1.0, 0.1], [0.7, 1.0]]), 1)
    with pytest.raises(ValueError, match="each of 3 items has 2 others"):
        most_similar(torch.ones(3, 3), 3)
    with pytest.raises(ValueError, match="need a label for each item"):
        adjusted_rand_index(torch.zeros(3), torch.zeros(4))
