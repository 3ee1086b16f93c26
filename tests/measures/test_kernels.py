"""Kernel measures against other packages and against their definitions, written out."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.spatial
from paired import correlated_rows
from sklearn.metrics import pairwise

import sosie
from sosie.measures import find, rbf_cka


def arrays(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n=n, p=7, q=5)
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("unbiased", [False, True])
def test_distance_correlation_is_that_of_dcor(unbiased: bool) -> None:
    dcor = pytest.importorskip("dcor", reason="the package dcor is not installed")
    x, y = arrays()
    expected = dcor.u_distance_correlation_sqr(x, y) if unbiased else dcor.distance_correlation(x, y)
    assert sosie.measure("distance_correlation", x, y, unbiased=unbiased) == pytest.approx(expected, abs=1e-10)


def test_distance_correlation_by_its_definition() -> None:
    x, y = arrays(30)

    def centred(rows: np.ndarray) -> np.ndarray:
        d = np.array([[np.linalg.norm(a - b) for b in rows] for a in rows])
        return d - d.mean(0) - d.mean(1)[:, None] + d.mean()

    a, b = centred(x), centred(y)
    expected = np.sqrt((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean()))
    assert sosie.measure("distance_correlation", x, y) == pytest.approx(expected, abs=1e-12)


def test_unbiased_distance_correlation_of_independent_rows_is_zero_on_average() -> None:
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=(40, 30)), random.normal(size=(40, 30))) for _ in range(40)]
    unbiased = np.array([sosie.measure("distance_correlation", x, y, unbiased=True) for x, y in pairs])
    assert abs(unbiased.mean()) < 4 * unbiased.std() / 40**0.5
    assert (unbiased < 0).any()
    assert sosie.measure("distance_correlation", *pairs[0]) > 0.7, "the biased one is far from 0"


def test_deconfounded_cka_by_its_definition() -> None:
    x, y = arrays(40)
    z = np.random.default_rng(1).normal(size=(40, 6))
    x = x + z @ np.ones((6, 7))
    y = y + z @ np.ones((6, 5))

    def gram(rows: np.ndarray) -> np.ndarray:
        rows = rows - rows.mean(0)
        return rows @ rows.T

    def left(rows: np.ndarray) -> np.ndarray:
        k, k0 = gram(rows), gram(z)
        alpha = np.linalg.lstsq(k0.reshape(-1, 1), k.reshape(-1), rcond=None)[0][0]
        values, vectors = np.linalg.eigh(k - alpha * k0)
        return vectors @ np.diag(np.maximum(values, 0)) @ vectors.T

    a, b = left(x), left(y)
    expected = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
    found = sosie.measure("deconfounded_cka", x, y, inputs=z)
    assert found == pytest.approx(expected, abs=1e-8)
    assert found < sosie.measure("linear_cka", x, y), "what the inputs have in common is taken out"


def test_deconfounded_cka_with_negative_eigenvalues_kept_is_a_cosine_of_remainders() -> None:
    random = np.random.default_rng(3)
    z = random.normal(size=(40, 6))
    x, y = z @ random.normal(size=(6, 5)), z @ random.normal(size=(6, 4)) + random.normal(size=(40, 4))
    k, l, g = (c @ c.T for c in (a - a.mean(0) for a in (x, y, z)))
    k, l = (m - (m * g).sum() / (g * g).sum() * g for m in (k, l))
    expected = (k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum())
    assert sosie.measure("deconfounded_cka(positive=False)", x, y, inputs=z) == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ValueError, match="repeat the inputs"):
        sosie.measure("deconfounded_cka(positive=False)", x, y, inputs=2 * x)


def test_deconfounded_cka_says_what_it_needs() -> None:
    x, y = arrays(40)
    with pytest.raises(ValueError, match="also needs the inputs of the networks"):
        sosie.measure("deconfounded_cka", x, y)
    with pytest.raises(ValueError, match="the inputs do not vary"):
        sosie.measure("deconfounded_cka", x, y, inputs=np.ones((40, 3)))
    with pytest.raises(ValueError, match="the rows repeat the inputs"):
        sosie.measure("deconfounded_cka", x, y, inputs=2 * x)
    with pytest.raises(TypeError, match="linear_cka takes no inputs"):
        sosie.measure("linear_cka", x, y, inputs=x)
    with pytest.raises(ValueError, match="need paired rows"):
        sosie.measure("deconfounded_cka", x, y, inputs=x[:30])


def test_cknna_by_its_definition() -> None:
    x, y = arrays(30)
    k = 4

    def kernel(rows: np.ndarray) -> np.ndarray:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return rows @ rows.T

    def near(gram: np.ndarray, i: int) -> set[int]:
        order = [j for j in np.argsort(-gram[i]) if j != i]
        return set(order[:k])

    def aligned(a: np.ndarray, b: np.ndarray) -> float:
        found = 0.0
        for i in range(len(a)):
            for j in near(a, i) & near(b, i):
                found += (a[i, j] - a[i].mean()) * (b[i, j] - b[i].mean())
        return found

    a, b = kernel(x), kernel(y)
    expected = aligned(a, b) / np.sqrt(aligned(a, a) * aligned(b, b))
    assert sosie.measure("cknna", x, y, k=k) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="needs more than k rows"):
        sosie.measure("cknna", x, y, k=30)


# Kernels of a fixed width, other kernels, and kernels without their diagonal: NumPy and scikit-learn's kernels


def of_kernels(k: np.ndarray, l: np.ndarray, *, debiased: bool = False) -> float:
    """CKA by its definition; the debiased one by the sums of Song et al. 2012, equation 5."""
    n = len(k)
    if not debiased:
        h = np.eye(n) - 1 / n
        k, l = h @ k @ h, h @ l @ h
        return float((k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum()))

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a - np.diag(np.diag(a)), b - np.diag(np.diag(b))
        between = a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a.sum(0) @ b.sum(0))
        return float((a * b).sum() + between)

    return hsic(k, l) / (hsic(k, k) * hsic(l, l)) ** 0.5


def apart(rows: np.ndarray) -> np.ndarray:
    return scipy.spatial.distance.cdist(rows, rows)


KERNELS = {
    "rbf_cka": lambda r: np.exp(-(apart(r) ** 2) / (2 * 0.25 * np.median(apart(r) ** 2))),
    "rbf_cka(width=2.5)": lambda r: pairwise.rbf_kernel(r, gamma=1 / (2 * 2.5**2)),
    "laplace_cka": lambda r: np.exp(-apart(r) / np.median(apart(r))),
    "laplace_cka(width=2.5)": lambda r: np.exp(-apart(r) / 2.5),
    "polynomial_cka(degree=2, offset=0.5, gamma=0.2)": lambda r: pairwise.polynomial_kernel(
        r - r.mean(0), degree=2, gamma=0.2, coef0=0.5
    ),
    "polynomial_cka": lambda r: pairwise.polynomial_kernel(
        r - r.mean(0), degree=3, gamma=1 / ((r - r.mean(0)) ** 2).sum(1).mean(), coef0=1
    ),
}


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_by_its_definition(name: str, debiased: bool) -> None:
    x, y = arrays()
    expected = of_kernels(KERNELS[name](x), KERNELS[name](y), debiased=debiased)
    measure = find(name).using(debiased=debiased)
    assert sosie.measure(measure, x, y) == pytest.approx(expected, abs=1e-12)


def test_a_polynomial_of_degree_1_and_a_wide_kernel_are_linear() -> None:
    x, y = arrays()
    for debiased, linear in ((False, "linear_cka"), (True, "debiased_cka")):
        expected = sosie.measure(linear, x, y)
        assert sosie.measure("polynomial_cka", x, y, degree=1, debiased=debiased) == pytest.approx(expected, abs=1e-12)
        assert sosie.measure("rbf_cka", x, y, width=300.0, debiased=debiased) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["rbf_cka", "laplace_cka", "polynomial_cka"])
def test_debiased_kernels_of_independent_rows_are_zero_on_average(name: str) -> None:
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=(40, 30)), random.normal(size=(40, 30))) for _ in range(40)]
    values = np.array([sosie.measure(name, x, y, debiased=True) for x, y in pairs])
    assert abs(values.mean()) < 4 * values.std() / 40**0.5
    assert sosie.measure(name, *pairs[0]) > 0.3, "the biased one is far from 0"


def test_options_change_the_facts_they_change() -> None:
    assert "scale" in rbf_cka.invariant
    assert "scale" not in rbf_cka.using(width=2.0).invariant
    assert rbf_cka.using(debiased=True).bounds == (-1, 1)
    assert rbf_cka.using(debiased=False).bounds == (0, 1)
    x, y = arrays()
    for name in ("rbf_cka", "laplace_cka"):
        with pytest.raises(ValueError, match="take a larger width"):
            sosie.measure(name, x, y, width=1e-3)
        with pytest.raises(ValueError, match="take a smaller width"):
            sosie.measure(name, x, y, width=1e200)
        with pytest.raises(ValueError, match="take a larger width or bandwidth"):
            sosie.measure(name, x, y, bandwidth=1e-3)
        with pytest.raises(ValueError, match="must be a number above 0"):
            sosie.measure(name, x, y, width=0)
    for offset in (-1.0, np.nan, "1"):
        with pytest.raises(ValueError, match="offset of polynomial_cka"):
            sosie.measure("polynomial_cka", x, y, offset=offset)
    with pytest.raises(ValueError, match="needs at least 4 rows, got 3"):
        sosie.measure("rbf_cka", x[:3], y[:3], debiased=True)


def test_hsic_and_the_angle_are_those_of_linear_cka() -> None:
    x, y = arrays()
    n = len(x)
    h = np.eye(n) - 1 / n
    expected = np.trace(x @ x.T @ h @ y @ y.T @ h) / (n - 1) ** 2
    assert sosie.measure("hsic", x, y) == pytest.approx(expected, rel=1e-12)
    parts = sosie.measure("hsic", x, x), sosie.measure("hsic", y, y)
    assert sosie.measure("hsic", x, y) / np.sqrt(np.prod(parts)) == pytest.approx(sosie.measure("linear_cka", x, y))
    assert np.cos(sosie.measure("cka_angle", x, y)) == pytest.approx(sosie.measure("linear_cka", x, y), abs=1e-12)
    z = np.random.default_rng(0).normal(size=(n, 6))
    a, b, c = (sosie.measure("cka_angle", *pair) for pair in ((x, y), (y, z), (x, z)))
    assert c <= a + b, "a metric: the triangle inequality"
