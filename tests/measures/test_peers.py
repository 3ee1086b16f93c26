"""Known values and properties of other packages, each with its source; no code of theirs runs here."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.spatial
import torch
from paired import numpy_pair

import sosie

# figures/metric_vs_repo.csv of github.com/nacloos/similarity-repository (commit 4ddef0ce) has the values of some thirty
# repositories for np.random.seed(0); X = np.random.rand(30, 25); Y = np.random.rand(30, 25). By measure of sosie: the
# column, a repository that has it, and the value.
TABLE = {
    "linear_cka": ("cka linear, hsic gretton, score", "netrep", 0.48934273910441545),
    "debiased_cka": ("cka linear, hsic song, score", "representation_similarity", 0.023598698580556743),
    "cka_angle": ("cka linear, hsic gretton, angular", "repsim", 1.0594603937845422),
    "rbf_cka(width=1.0)": ("cka rbf sigma 1, hsic gretton, score", "sim_metric", 0.8940267986288921),
    "rbf_cka(width=1.0, debiased=True)": ("cka rbf sigma 1, hsic song, score", "thingsvision", 0.06763941584088347),
    # The table's Laplace kernel of σ = 1 is exp(−d / √2).
    "laplace_cka(width=1.4142135623730951)": ("cka laplace sigma 1, hsic gretton, score", "repsim", 0.9433315582114501),
    "distance_correlation": ("distance_correlation", "resi", 0.8852696524417103),
    "mean_cca": ("cca, score", "svcca", 0.8901049738157812),
    "cca_r2": ("cca, squared score", "representation_similarity", 0.8583001426315533),
    "shape_angle(alpha=0.0)": ("cca, angular", "netrep", 0.47322087985030586),
    "svcca": ("svcca 0.99, score", "svcca", 0.7831814122650432),
    "svcca(keep=0.95)": ("svcca 0.95, score", "sim_metric", 0.7281605586835189),
    "svcca(directions=10)": ("svcca dim 10, score", "netrep", 0.5379744461044429),
    "normalized_bures": ("nbs, score", "netrep", 0.7227787175993361),
    "procrustes_angle": ("procrustes, angular", "sim_metric", 0.7629815799340969),
    "procrustes_distance": ("orthogonal_procrustes_centered_and_normalized", "resi", 0.7446090012894865),
    "raw_procrustes_distance": ("procrustes, euclidean", "netrep", 5.851126077853428),
    "hard_correlation_match": ("hard_correlation_match", "resi", 0.3363914592542919),
    "aligned_cosine": ("aligned_cosine_similarity", "resi", 0.9284614848625562),
    "jaccard": ("jaccard_similarity", "resi", 0.21488074762068568),
    "rank_similarity": ("rank_similarity", "resi", 0.137112252104584),
    "magnitude_difference": ("magnitude_difference", "resi", 0.09000616637580139),
    "concentricity_difference": ("concentricity_difference", "resi", 0.005424143247378943),
    "rsa(compare='pearson')": ("rsa correlation, pearson", "rsatoolbox", 0.0035062460192807096),
    "rsa": ("rsa correlation, spearman", "rsatoolbox", -0.004092795694065198),
    "rsa(compare='kendall')": ("rsa correlation, tau_a", "rsatoolbox", -0.0020022246941045607),
    "rsa(compare='cosine')": ("rsa correlation, cosine", "rsatoolbox", 0.9587049512055273),
    "rsa(compare='whitened_cosine')": ("rsa correlation, cosine_cov", "rsatoolbox", 0.4807128317509676),
    "rsa(dissimilarity='cosine', compare='pearson')": ("rsa cosine, pearson", "thingsvision", 0.06489714360283982),
    "rsa(dissimilarity='cosine')": ("rsa cosine, spearman", "thingsvision", 0.059664079937370336),
    "rsa(dissimilarity='euclidean', compare='pearson')": (
        "rsa euclidean, pearson", "thingsvision", 0.05843572919046084,
    ),
    "rsa(dissimilarity='euclidean')": ("rsa euclidean, spearman", "thingsvision", 0.026652156101799433),
    "rsa(dissimilarity='squared_euclidean', compare='pearson')": (
        "rsa squared_euclidean, pearson", "rsatoolbox", 0.048084920240642405,
    ),
    "rsa(dissimilarity='squared_euclidean', compare='kendall')": (
        "rsa squared_euclidean, tau_a", "rsatoolbox", 0.018740399385560675,
    ),
    "rsa(dissimilarity='squared_euclidean', compare='cosine')": (
        "rsa squared_euclidean, cosine", "rsatoolbox", 0.9510853545112662,
    ),
    "rsa(dissimilarity='squared_euclidean', compare='whitened_cosine')": (
        "rsa squared_euclidean, cosine_cov", "rsatoolbox", 0.4893427391044152,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def uniform() -> tuple[np.ndarray, np.ndarray]:
    state = np.random.RandomState(0)
    return state.rand(30, 25), state.rand(30, 25)


@pytest.mark.filterwarnings("ignore::UserWarning")  # 25 neurons for 30 rows, as the table has them
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_similarity_repository(name: str, uniform: tuple[np.ndarray, np.ndarray]) -> None:
    _, _, value = TABLE[name]
    assert sosie.measure(name, *uniform) == pytest.approx(value, abs=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_conventions_of_that_table_that_differ(uniform: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = uniform
    # netrep: the angle of the best permutation, 2 arcsin of half our distance.
    distance = sosie.measure("permutation_procrustes_distance", x, y)
    assert 2 * np.arcsin(distance / 2) == pytest.approx(1.2298287595147774, abs=1e-10)
    # ReSi regresses x on y, takes the soft match from both sides, and does not centre for the eigenspaces.
    assert sosie.measure("regression_r2", y, x) == pytest.approx(0.863424815867745, abs=1e-10)
    soft = [sosie.measure("soft_correlation_match", *sides) for sides in ((x, y), (y, x))]
    assert np.mean(soft) == pytest.approx(0.3761355416924346, abs=1e-10)
    u, v = (np.linalg.qr(side)[0] for side in (x, y))
    assert np.linalg.norm(u.T @ v) ** 2 / 25 == pytest.approx(0.8310349228244533, abs=1e-10)
    assert sosie.measure("eigenspace_overlap", x, y) == pytest.approx(0.8583001426315533, abs=1e-10)
    # ReSi's RSM norm difference: the spectral norm of Euclidean distances, not the Frobenius norm of cosines.
    apart = [scipy.spatial.distance.cdist(side, side) for side in (x, y)]
    assert np.linalg.norm(apart[0] - apart[1], 2) == pytest.approx(4.284020876165366, abs=1e-10)
    # With 25 and 25 neurons in 30 rows 21 canonical correlations are 1, of arbitrary directions: so are the weights of
    # pwcca. sim_metric has 0.8933.
    assert sosie.measure("pwcca", x, y) == pytest.approx(0.8933410211502996, abs=4e-3)


def test_pwcca_of_sim_metric_truncates_normalised_weights() -> None:
    """Its weights sum to 1 over the directions of x; those beyond the width of y are then dropped."""
    x, y = (side - side.mean(0) for side in numpy_pair(6, 4))
    qx, qy = (np.linalg.qr(side)[0] for side in (x, y))
    u, correlations, _ = np.linalg.svd(qx.T @ qy)
    weights = np.abs((qx @ u).T @ x).sum(1)
    theirs = (weights / weights.sum())[:4] @ correlations
    kept = weights[:4].sum() / weights.sum()
    assert theirs == pytest.approx(sosie.measure("pwcca", x, y) * kept, abs=1e-10)
    assert kept < 0.9


# Properties that the tests of github.com/ahwillia/netrep hold, for its rows (seeds 1 to 3)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_netrep_distances_that_vanish(seed: int) -> None:
    state = np.random.RandomState(seed)
    x, square, shift = state.randn(100, 10), state.randn(10, 10), state.randn(1, 10)
    rotated, mixed = state.exponential() * x @ np.linalg.qr(square)[0] + shift, x @ square + shift
    assert sosie.measure("procrustes_angle", x, rotated) == pytest.approx(0, abs=1e-6)
    assert sosie.measure("shape_angle(alpha=0.0)", x, mixed) == pytest.approx(0, abs=1e-6)
    assert sosie.measure("procrustes_angle", x, mixed) > 1e-2
    permuted = x[:, state.permutation(10)]
    assert sosie.measure("permutation_procrustes_distance", x, permuted) == pytest.approx(0, abs=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_netrep_triangle_inequality(seed: int, alpha: float) -> None:
    x, y, z = np.random.RandomState(seed).randn(3, 31, 30)
    to_y, over_z, from_z = (sosie.measure("shape_angle", *pair, alpha=alpha) for pair in ((x, y), (x, z), (z, y)))
    assert to_y <= over_z + from_z + 1e-9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lam", [0.01, 1.0])
def test_netrep_distances_make_a_positive_kernel(lam: float) -> None:
    state = np.random.RandomState(1)
    start = state.randn(31, 30)
    points = [0.2 * start + 0.8 * state.randn(31, 30) for _ in range(10)]
    apart = np.array([[sosie.measure("procrustes_angle", a, b) for b in points] for a in points])
    assert np.linalg.eigvalsh(np.exp(-lam * apart)).min() > -1e-6


# What the tests of github.com/moskomule/anatome ask of its distances


def test_anatome_shapes() -> None:
    random = torch.Generator().manual_seed(0)
    a, b, wide, fewer = (torch.randn(*s, generator=random) for s in ((10, 5), (10, 8), (10, 20), (8, 5)))
    for name in ("mean_cca", "linear_cka", "procrustes_distance"):
        with pytest.raises(ValueError, match="need paired rows, got 10 and 8"):
            sosie.measure(name, a, fewer)
    with pytest.warns(UserWarning, match="all correlations are 1"):  # where anatome raises
        assert sosie.measure("mean_cca", a, wide) == pytest.approx(1)
    with pytest.warns(UserWarning, match="biased"):
        assert 0 < sosie.measure("linear_cka", a, wide) < 1
    u, v = (np.linalg.qr(side - side.mean(0))[0] for side in (a.double().numpy(), b.double().numpy()))
    by_qr = np.linalg.svd(u.T @ v, compute_uv=False).mean()
    with pytest.warns(UserWarning, match="are 1 whatever the rows"):
        assert sosie.measure("mean_cca", a, b) == pytest.approx(by_qr, abs=1e-6)
