"""Kernel measures against other packages and against their definitions, written out."""

from __future__ import annotations

import numpy as np
import pytest
from paired import correlated_rows

import sosie


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
