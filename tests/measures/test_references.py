"""Values from outside: published demo data, scikit-learn, SciPy, and identities."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
import scipy.stats
import torch
from paired import correlated_rows, numpy_pair
from sklearn.cross_decomposition import CCA
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import NearestNeighbors

import sosie


@pytest.fixture
def demo() -> tuple[np.ndarray, np.ndarray]:
    """The data of the demo notebook of Kornblith et al. 2019."""
    state = np.random.RandomState(1337)
    x = state.randn(100, 10)
    return x, state.randn(100, 10) + x


# The first four: printed by, or computed with, the code of that notebook; the others: closed forms in NumPy.
@pytest.mark.filterwarnings("ignore:gaussian_information")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("linear_cka", 0.5576132566),
        ("rbf_cka", 0.6548311823),
        ("debiased_cka", 0.5134564895),
        ("cca_r2", 0.5453963322),
        ("normalized_bures", 0.73625531),
        ("procrustes_angle", 0.7432764761),
        ("gaussian_information", 4.2602117636),
    ],
)
def test_demo_of_kornblith(demo: tuple[np.ndarray, np.ndarray], name: str, value: float) -> None:
    assert sosie.measure(name, *demo) == pytest.approx(value, abs=1e-8)


def test_canonical_correlations_against_scikit_learn() -> None:
    x, y = numpy_pair()
    u, v = CCA(n_components=4, scale=False, max_iter=5000, tol=1e-12).fit_transform(x, y)
    correlations = [abs(np.corrcoef(u[:, i], v[:, i])[0, 1]) for i in range(4)]
    assert sosie.measure("mean_cca", x, y) == pytest.approx(np.mean(correlations), abs=1e-5)
    assert sosie.measure("cca_r2", x, y) == pytest.approx(np.mean(np.square(correlations)), abs=1e-5)


def test_canonical_correlations_against_subspace_angles() -> None:
    x, y = numpy_pair()
    cosines = np.cos(scipy.linalg.subspace_angles(x - x.mean(0), y - y.mean(0)))
    assert sosie.measure("mean_cca", x, y) == pytest.approx(cosines.mean(), abs=1e-10)


def test_svcca_is_cca_of_principal_components() -> None:
    x, y = numpy_pair()

    def leading(rows: np.ndarray, share: float) -> np.ndarray:
        u, s, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
        count = int(np.searchsorted(np.cumsum(s**2) / np.sum(s**2), share) + 1)
        return u[:, :count]

    u, v = leading(x, 0.9), leading(y, 0.9)
    assert u.shape[1] < 6
    assert sosie.measure("svcca", x, y, keep=0.9) == pytest.approx(
        np.linalg.svd(u.T @ v, compute_uv=False).mean(), abs=1e-10
    )


@pytest.mark.parametrize("count", [1, 3, 4])
def test_svcca_of_a_number_of_directions(count: int) -> None:
    x, y = numpy_pair()
    u, v = (np.linalg.svd(side - side.mean(0), full_matrices=False)[0][:, :count] for side in (x, y))
    expected = np.linalg.svd(u.T @ v, compute_uv=False).mean()
    assert sosie.measure("svcca", x, y, directions=count) == pytest.approx(expected, abs=1e-10)
    of_sums = sosie.Running("svcca", directions=count)
    of_sums.update(x, y)
    assert of_sums.compute() == pytest.approx(expected, abs=1e-10)
    with pytest.raises(ValueError, match=r"svcca\(directions=5\): a side varies in 4 directions only"):
        sosie.measure("svcca", x, y, directions=5)


def test_svcca_of_a_number_of_directions_of_more_neurons_than_rows() -> None:
    random = np.random.RandomState(0)
    x, y = random.randn(30, 50), random.randn(30, 40) * 10.0 ** -np.arange(40)
    u, v = (np.linalg.svd(side - side.mean(0), full_matrices=False)[0][:, :8] for side in (x, y))
    expected = np.linalg.svd(u.T @ v, compute_uv=False).mean()
    assert sosie.measure("svcca", x, y, directions=8) == pytest.approx(expected, abs=1e-8)
    with pytest.warns(UserWarning, match="20 and 20 dimensions for n=30 rows: 11 of 20 correlations are 1"):
        sosie.measure("svcca", x, x, directions=20)


def test_pwcca_by_its_formula() -> None:
    x, y = numpy_pair()
    x, y = x - x.mean(0), y - y.mean(0)
    qx, qy = (np.linalg.qr(side)[0] for side in (x, y))
    u, correlations, _ = np.linalg.svd(qx.T @ qy, full_matrices=False)
    weights = np.abs((qx @ u).T @ x).sum(1)
    assert sosie.measure("pwcca", x, y) == pytest.approx(weights @ correlations / weights.sum(), abs=1e-10)


def mean_over_choices(x: np.ndarray, y: np.ndarray, draws: int = 2000) -> float:
    """PWCCA with the mean weights over random choices of the canonical directions of equal correlations."""
    random = np.random.default_rng(0)
    x, y = x - x.mean(0), y - y.mean(0)
    qx, qy = (np.linalg.svd(side, full_matrices=False)[0][:, : np.linalg.matrix_rank(side)] for side in (x, y))
    u, found, _ = np.linalg.svd(qx.T @ qy)
    correlations = np.zeros(len(u))
    correlations[: len(found)] = found
    weights = np.zeros(len(found))
    for _ in range(draws):
        turned = u.copy()
        for value in np.unique(correlations.round(9)):
            tied = np.flatnonzero(correlations.round(9) == value)
            turned[:, tied] = u[:, tied] @ np.linalg.qr(random.normal(size=(len(tied), len(tied))))[0]
        weights += np.abs((qx @ turned[:, : len(found)]).T @ x).sum(1) / draws
    return float(weights @ found / weights.sum())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pwcca_does_not_depend_on_the_choice_of_directions_of_equal_correlations() -> None:
    random = np.random.default_rng(0)
    factors = np.stack(np.meshgrid(*[range(4)] * 3), -1).reshape(-1, 3)
    first, second, third = (np.eye(4)[factors[:, k]] for k in range(3))
    mixed = random.normal(size=(64, 5))
    for x, y in (
        (random.normal(size=(40, 25)) * np.geomspace(1, 10, 25), random.normal(size=(40, 25))),  # 11 of ρ = 1
        (random.normal(size=(40, 30)), random.normal(size=(40, 15))),
        (np.hstack([first, second, third]) @ np.diag(np.arange(1, 13)), np.hstack([first, mixed])),  # 3 of ρ = 1
        (np.hstack([first, second]) @ np.diag(np.arange(1, 9)), np.hstack([mixed[:, :1], third])),  # 3 of ρ = 0
    ):
        value = sosie.measure("pwcca", x, y)
        assert value == pytest.approx(mean_over_choices(x, y), abs=2e-4)
        rows, p, q = random.permutation(len(x)), random.permutation(x.shape[1]), random.normal(size=(y.shape[1],) * 2)
        assert sosie.measure("pwcca", 3 * x[rows][:, p] + 1, y[rows] @ q) == pytest.approx(value, abs=1e-10)
        assert sosie.align("pwcca", x, y).score(x, y) == pytest.approx(value, abs=1e-9)
        assert sosie.compare({"a": x}, {"b": y}, measures="pwcca").matrix()[0, 0] == pytest.approx(value, abs=1e-9)


def test_pwcca_with_the_narrow_side_first() -> None:
    """A peer raises IndexError here."""
    x, y = numpy_pair()
    assert 0 < sosie.measure("pwcca", y, x) < 1


def test_procrustes_against_scipy() -> None:
    x, y = correlated_rows(n=80, p=5, q=5)
    x, y = (side - side.mean(0) for side in (x.numpy(), y.numpy()))
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    rotation, scale = scipy.linalg.orthogonal_procrustes(x, y)
    assert sosie.measure("procrustes_distance", x, y) == pytest.approx(np.linalg.norm(x @ rotation - y), abs=1e-10)
    assert sosie.measure("normalized_bures", x, y) == pytest.approx(scale, abs=1e-10)


def test_bures_is_the_fidelity_of_the_gram_matrices() -> None:
    x, y = numpy_pair()
    k, l = ((side - side.mean(0)) @ (side - side.mean(0)).T for side in (x, y))

    def root(gram: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(gram)
        return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T

    fidelity = np.linalg.svd(root(k) @ root(l), compute_uv=False).sum()
    expected = fidelity / np.sqrt(np.trace(k) * np.trace(l))
    assert sosie.measure("normalized_bures", x, y) == pytest.approx(expected, abs=1e-6)


def test_regression_against_scikit_learn() -> None:
    x, y = numpy_pair()
    model = LinearRegression().fit(x, y)
    explained = 1 - ((y - model.predict(x)) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    assert sosie.measure("regression_r2", x, y) == pytest.approx(explained, abs=1e-10)


def test_rsa_against_scipy() -> None:
    x, y = numpy_pair()
    distances = [scipy.spatial.distance.pdist(side, "correlation") for side in (x, y)]
    assert sosie.measure("rsa", x, y) == pytest.approx(scipy.stats.spearmanr(*distances).statistic, abs=1e-10)
    distances = [scipy.spatial.distance.pdist(side, "euclidean") for side in (x, y)]
    assert sosie.measure("rsa", x, y, dissimilarity="euclidean", compare="pearson") == pytest.approx(
        scipy.stats.pearsonr(*distances).statistic, abs=1e-10
    )


def test_rsa_with_ties_against_scipy() -> None:
    state = np.random.RandomState(0)
    x, y = state.randint(0, 3, (30, 4)).astype(float), state.randint(0, 3, (30, 3)).astype(float)
    distances = [scipy.spatial.distance.pdist(side, "euclidean") for side in (x, y)]
    assert sosie.measure("rsa", x, y, dissimilarity="euclidean") == pytest.approx(
        scipy.stats.spearmanr(*distances).statistic, abs=1e-10
    )


def test_mutual_knn_against_scikit_learn() -> None:
    x, y = numpy_pair()
    near = [
        NearestNeighbors(n_neighbors=6, metric="cosine").fit(s).kneighbors(s, return_distance=False) for s in (x, y)
    ]
    near = [[set(row) - {i} for i, row in enumerate(side)] for side in near]
    shared = np.mean([len(a & b) / 5 for a, b in zip(*near, strict=True)])
    assert sosie.measure("mutual_knn", x, y, k=5) == pytest.approx(shared, abs=1e-12)


# Identities


def test_linear_cka_is_the_cosine_of_centred_squared_distances() -> None:
    x, y = numpy_pair()
    centre = np.eye(80) - 1 / 80

    def whitened(side: np.ndarray) -> np.ndarray:
        return centre @ scipy.spatial.distance.squareform(scipy.spatial.distance.pdist(side, "sqeuclidean")) @ centre

    k, l = whitened(x), whitened(y)
    assert sosie.measure("linear_cka", x, y) == pytest.approx(
        (k * l).sum() / (np.linalg.norm(k) * np.linalg.norm(l)), abs=1e-12
    )


def test_procrustes_distance_squared_is_norms_less_twice_the_nuclear_norm() -> None:
    x, y = numpy_pair()
    a, b = (side - side.mean(0) for side in (x, y))
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    nuclear = np.linalg.svd(a.T @ b, compute_uv=False).sum()
    assert sosie.measure("procrustes_distance", x, y) ** 2 == pytest.approx(2 - 2 * nuclear, abs=1e-12)


def test_what_a_rotation_and_a_linear_map_do() -> None:
    x, _ = correlated_rows(n=80, p=6)
    random = torch.Generator().manual_seed(2)
    square = torch.randn(6, 6, generator=random, dtype=x.dtype)
    moved = 3 * x @ torch.linalg.qr(square).Q + 5
    assert sosie.measure("procrustes_distance", x, moved) == pytest.approx(0, abs=1e-7)
    assert sosie.measure("linear_cka", x, moved) == pytest.approx(1, abs=1e-12)
    skewed = x @ square + 5
    assert sosie.measure("mean_cca", x, skewed) == pytest.approx(1, abs=1e-9)
    assert sosie.measure("linear_cka", x, skewed) < 0.99


def test_bures_of_squared_kernels_bounds_cka() -> None:
    x, y = numpy_pair()
    # Rows of the centred Gram matrix are features whose linear kernel is the squared kernel.
    k, l = ((s - s.mean(0)) @ (s - s.mean(0)).T for s in (x, y))
    assert sosie.measure("linear_cka", x, y) <= sosie.measure("normalized_bures", k, l) + 1e-12


def test_angle_of_orthonormal_columns_is_the_mean_canonical_correlation() -> None:
    x, y = correlated_rows(n=80, p=5, q=5)
    x, y = (torch.linalg.qr(side - side.mean(0)).Q for side in (x, y))
    angle = sosie.measure("procrustes_angle", x, y)
    assert angle == pytest.approx(np.arccos(sosie.measure("mean_cca", x, y)), abs=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_more_neurons_than_rows_saturate_canonical_correlations() -> None:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 30, generator=random, dtype=torch.float64) for _ in range(2))
    assert sosie.measure("mean_cca", x, y) == pytest.approx(1, abs=1e-9)
    assert sosie.measure("regression_r2", x, y) == pytest.approx(1, abs=1e-9)


def test_a_dead_and_a_repeated_neuron_do_not_disturb_canonical_correlations() -> None:
    x, y = correlated_rows(n=80, p=6, q=4)
    clean = sosie.measure("mean_cca", x, y)
    worse = torch.cat([x, torch.zeros(80, 1), x[:, :1], 1e-7 * x[:, 1:2]], dim=1)
    assert sosie.measure("mean_cca", worse, y) == pytest.approx(clean, abs=1e-8)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["mean_cca", "cca_r2", "pwcca", "regression_r2"])
def test_a_quiet_neuron_counts_like_a_loud_one_with_more_neurons_than_rows_too(name: str) -> None:
    x, y = correlated_rows(n=80, p=6, q=4)
    x = torch.cat([x[:, :5], 1e-7 * x[:, 5:]], dim=1)
    wide = torch.cat([x] + [x[:, :5] @ torch.randn(5, 30, dtype=x.dtype) for _ in range(3)], dim=1)
    assert wide.shape[1] > len(wide)
    narrow, found = sosie.measure(name, x, y), sosie.measure(name, wide, y)
    if name != "pwcca":  # which weighs by the neurons
        assert found == pytest.approx(narrow, abs=1e-6)
    shuffled = sosie.measure(name, wide[:, torch.randperm(wide.shape[1])], y)
    assert found == pytest.approx(shuffled, abs=1e-9)


def test_constant_columns_are_no_directions() -> None:
    random = np.random.RandomState(0)
    x, y = random.randn(100, 3), random.randn(100, 3)
    padded = [np.c_[side, np.full(100, 0.1), np.full(100, 0.7), np.full(100, 1 / 3)] for side in (x, y)]
    for name in ("mean_cca", "cca_r2", "regression_r2"):
        assert sosie.measure(name, *padded) == pytest.approx(sosie.measure(name, x, y), abs=1e-9)


# Neurons that nearly repeat one another, against 60 digits


def orthonormal(rows: np.ndarray) -> list:
    """Columns that span the centred rows, by Gram and Schmidt in mpmath."""
    found: list = []
    for column in rows.T.tolist():
        numbers = [mpmath.mpf(each) for each in column]
        mean = sum(numbers) / len(numbers)
        v = mpmath.matrix([each - mean for each in numbers])
        for u in found:
            v -= u * (u.T * v)[0]
        found.append(v / mpmath.norm(v))
    return found


def to_60_digits(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    with mpmath.workdps(60):
        of_x, of_y = orthonormal(x), orthonormal(y)
        shared = np.array([[float((u.T * v)[0]) for v in of_y] for u in of_x])
        centred = y - y.mean(0)
        seen = sum(float((u.T * mpmath.matrix(column))[0]) ** 2 for u in of_x for column in centred.T.tolist())
    rho = np.linalg.svd(shared, compute_uv=False)
    return {
        "mean_cca": rho.mean(),
        "cca_r2": (rho**2).mean(),
        "eigenspace_overlap": (rho**2).mean(),
        "gaussian_information": -np.log1p(-(rho**2)).sum() / 2,
        "regression_r2": seen / (centred**2).sum(),
        "shape_angle(alpha=0.0)": np.arccos(rho.mean()),
        "svcca(keep=1.0)": rho.mean(),
    }


def nearly_alike(how: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 5))
    y = x @ random.normal(size=(5, 5)) + random.normal(size=(120, 5))
    if how == "an outlier":
        x[7] = 1e6 * (1 + 0.1 * random.normal(size=5))
    elif how == "a shift as well":
        x = x + 1e4 * random.normal(size=(120, 1)) + 1e5
    else:
        x = x + float(how) * random.normal(size=(120, 1))
    return x, y


@pytest.mark.filterwarnings("ignore:gaussian_information")
@pytest.mark.parametrize("how", ["1e3", "1e5", "1e8", "an outlier", "a shift as well"])
def test_directions_that_are_small_beside_one(how: str) -> None:
    """A covariance squares how small they are: at 1e5 mean_cca was that of one direction, and nothing said so."""
    x, y = nearly_alike(how)
    truth = to_60_digits(x, y)
    compared = sosie.compare({"a": x}, {"b": y}, measures=list(truth))
    for name, value in truth.items():
        if name == "svcca(keep=1.0)" and how == "1e8":
            continue  # what it leaves out holds less than 1e-12 of the variance
        near = pytest.approx(value, abs=1e-7)
        assert sosie.measure(name, x, y) == near, name
        assert compared.matrix(name)[0, 0] == near, name
    assert sosie.measure("mean_cca", y, x) == pytest.approx(truth["mean_cca"], abs=1e-7)
    whitened, plain = (
        sosie.measure("rsa(dissimilarity='mahalanobis')", rows, y) for rows in (x, x @ np.diag(range(1, 6)))
    )
    assert whitened == pytest.approx(plain, abs=1e-6)


def test_canonical_directions_weighted_by_neurons_that_are_nearly_alike() -> None:
    x, y = nearly_alike("1e5")
    near = pytest.approx(sosie.measure("pwcca", y, x + x.sum(1, keepdims=True)), abs=1e-7)
    assert sosie.measure("pwcca", y, x) == near  # any map of the side that does not weigh leaves it as it is
