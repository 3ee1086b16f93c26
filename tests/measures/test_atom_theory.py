"""The propositions, theorems and lemmas of the atoms paper on numbers: what holds, and what does not, with examples.

A = αX (rows, entries of a kernel) and D (entries, m) as in the paper's appendix, so that Z = AD and M = AᵀA.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import nn

import sosie
from sosie.models import AtomConv2d

Matrix = NDArray[np.float64]


def normal(*shape: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape)


def orthonormal(rows: int, columns: int, seed: int) -> Matrix:
    return np.linalg.qr(normal(rows, columns, seed=seed))[0]


def cosine(x: Matrix, y: Matrix) -> float:
    return sosie.measure("atom_cosine", x.T, y.T)


def grassmann(x: Matrix, y: Matrix) -> float:
    return sosie.measure("atom_grassmann", x.T, y.T)


def cca(z: Matrix, y: Matrix) -> float:
    """Equation 4, without centring, as the appendix has it."""
    found = np.linalg.norm(np.linalg.qr(z)[0].T @ np.linalg.qr(y)[0]) / np.sqrt(z.shape[1])
    return float(found)


def swapped(d: Matrix) -> Matrix:
    """The first two atoms change places."""
    return d[:, [1, 0, *range(2, d.shape[1])]]


def root(gram: Matrix) -> Matrix:
    return np.real(scipy.linalg.sqrtm(gram))


# Proposition 1: features move no further than ‖α‖ λ √|B| times as far as atoms.


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Identity()])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 8)])
def test_proposition_1_bounds_the_change_of_features(activation: nn.Module, inputs: int, outputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    layer = AtomConv2d(inputs, outputs, 3, 6, padding=1, bias=False, dtype=torch.float64).requires_grad_(False)
    ratios = []
    for step in range(40):
        x = torch.randn(1, inputs, 12, 12, generator=random, dtype=torch.float64)
        layer.coefficients.copy_(torch.randn(layer.coefficients.shape, generator=random, dtype=torch.float64))
        u = torch.randn(6, 3, 3, generator=random, dtype=torch.float64)
        v = u + 0.5 ** (step % 8) * torch.randn(6, 3, 3, generator=random, dtype=torch.float64)
        features = []
        for atoms in (u, v):
            layer.atoms.copy_(atoms)
            features.append(activation(layer(x)))
        patches = nn.functional.unfold(x, 3, padding=1)  # (1, inputs × 9, positions)
        bound = layer.coefficients.norm() * patches.norm(dim=1).max() * patches.shape[2] ** 0.5 * (u - v).norm()
        ratios.append(float((features[0] - features[1]).norm() / bound))
    assert max(ratios) <= 1
    assert max(ratios) > 0.01


def test_proposition_1_cannot_be_made_tighter() -> None:
    layer = AtomConv2d(1, 1, 3, 1, bias=False, dtype=torch.float64).requires_grad_(False)
    x = torch.arange(1.0, 10, dtype=torch.float64).view(1, 1, 3, 3)
    layer.atoms.copy_(x[0] / 7)
    moved = layer(x).norm()  # from atoms of 0, along the only patch there is
    assert float(moved) == pytest.approx(float(layer.coefficients.norm() * x.norm() * layer.atoms.norm()), rel=1e-12)


# Proposition 2: S_Gras = S_Atom for orthonormal atoms. Only ≤ holds.


def test_orthonormal_atoms_are_no_more_alike_than_their_spans() -> None:
    gaps = []
    for seed in range(60):
        m = 1 + seed % 8
        u, v = orthonormal(9, m, seed), orthonormal(9, m, 100 + seed)
        gaps.append(grassmann(u, v) - cosine(u, v))
        angles = scipy.linalg.subspace_angles(u, v)
        assert grassmann(u, v) == pytest.approx(np.cos(angles).mean(), abs=1e-12)
    assert min(gaps) >= -1e-12
    assert max(gaps) > 0.3


@pytest.mark.parametrize("m", range(2, 9))
def test_proposition_2_fails_for_two_atoms_that_change_places(m: int) -> None:
    u = orthonormal(9, m, seed=m)
    assert grassmann(u, swapped(u)) == pytest.approx(1, abs=1e-12)
    assert cosine(u, swapped(u)) == pytest.approx((m - 2) / m, abs=1e-12)


def test_as_many_atoms_as_entries_have_one_span() -> None:
    u, v = normal(9, 9, seed=0), normal(9, 9, seed=1)
    assert np.cos(scipy.linalg.subspace_angles(u, v)) == pytest.approx(np.ones(9), abs=1e-12)
    with pytest.raises(ValueError, match="whatever the models"):
        grassmann(u, v)


# Theorem 1: S_CCA ≤ γ T c^(3/2) / C · S_Atom, for M = XᵀαᵀαX with trace T and least eigenvalue C.


def first_bound(a: Matrix, u: Matrix, v: Matrix) -> float:
    """The right-hand side of equation 35, γ kept; c is the number of columns of Z."""
    m = a.T @ a
    gamma = max(np.linalg.cond(d.T @ m @ d) for d in (u, v))
    return float(gamma * np.trace(m) * u.shape[1] ** 1.5 / np.linalg.eigvalsh(m)[0] * cosine(u, v))


def test_theorem_1_bounds_a_positive_number_by_a_negative_one() -> None:
    a, u = normal(200, 9, seed=0), normal(9, 6, seed=1)
    assert cca(a @ u, a @ -u) == pytest.approx(1)
    assert first_bound(a, u, -u) < 0


@pytest.mark.parametrize("entries", [2, 9])
def test_theorem_1_fails_for_positive_cosines_too(entries: int) -> None:
    identity = np.eye(entries)
    u = identity[:, :2]
    v = swapped(u) + 0.01 * u
    assert 0 < cosine(u, v) < 0.0101
    assert cca(identity @ u, identity @ v) == pytest.approx(1)
    assert first_bound(identity, u, v) < 0.3
    # As printed in equation 6, with C to the power 3/2, it fails as well: here C = 1 and T = entries.
    assert 1 / (1.05 * entries) > cosine(u, v)


def test_the_step_that_fails_takes_a_trace_of_a_product_for_one_of_positive_matrices() -> None:
    """Equations 26 and 27: Tr(ZᵤᵀZᵥ)² stands where ‖ZᵤᵀZᵥ‖² should, and Tr(MP) ≤ Tr(M) Tr(P) needs P ≥ 0."""
    u = np.eye(9)[:, :2]
    z, y = u, swapped(u)
    left = np.trace(np.linalg.inv(z.T @ z) @ z.T @ y @ np.linalg.inv(y.T @ y) @ y.T @ z)
    right = np.trace(np.linalg.inv(z.T @ z)) * np.trace(np.linalg.inv(y.T @ y)) * np.trace(z.T @ y) ** 2
    assert left == pytest.approx(2)
    assert right == 0
    m = np.diag([1.0, 3.0])
    p = np.diag([-1.0, 1.0])  # = DᵥDᵤᵀ for Dᵤ = I, Dᵥ = P
    assert np.trace(m @ p) > np.trace(m) * np.trace(p)


def test_equation_6_as_printed_changes_with_the_units_of_the_data() -> None:
    """C^(3/2) for c^(3/2): make the images small enough, and even a model with itself breaks it."""
    a, u = normal(200, 9, seed=0), normal(9, 6, seed=1)

    def left(a: Matrix) -> float:
        m = a.T @ a
        c = np.linalg.eigvalsh(m)[0]
        return float(c / (np.linalg.cond(u.T @ m @ u) * c**1.5 * np.trace(m))) * cca(a @ u, a @ u)

    assert left(a) <= cosine(u, u)
    assert left(1e-3 * a) > cosine(u, u)
    assert first_bound(1e-3 * a, u, u) == pytest.approx(first_bound(a, u, u))  # with channels it does not


def test_features_of_a_convolution_are_not_alpha_x_d() -> None:
    """One input channel: Z = patches · D · αᵀ, c columns and α on the right, so that CCA does not see α."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 1, 6, 6, generator=random, dtype=torch.float64)
    patches = nn.functional.unfold(x, 3).mT.flatten(0, 1).numpy()
    features = {}
    for name, seed in (("one", 1), ("other", 2)):
        layer = AtomConv2d(1, 8, 3, 4, bias=False, dtype=torch.float64).requires_grad_(False)
        layer.coefficients.copy_(torch.from_numpy(normal(8, 1, 4, seed=seed)))
        layer.atoms.copy_(torch.from_numpy(normal(4, 3, 3, seed=3)))
        features[name] = layer(x).movedim(1, -1).flatten(0, -2).numpy()
        assert features[name].shape == (20 * 16, 8)
        d, alpha = layer.atoms.flatten(1).numpy().T, layer.coefficients.flatten(1).numpy()
        assert features[name] == pytest.approx(patches @ d @ alpha.T, abs=1e-12)
    basis = [np.linalg.svd(z, full_matrices=False)[0][:, :4] for z in features.values()]
    assert np.linalg.norm(basis[0].T @ basis[1]) ** 2 / 4 == pytest.approx(1)


def test_s_cca_is_the_root_of_cca_r2() -> None:
    z, y = (each - each.mean(0) for each in (normal(300, 5, seed=0), normal(300, 5, seed=0) + normal(300, 5, seed=1)))
    assert cca(z, y) == pytest.approx(sosie.measure("cca_r2", z, y) ** 0.5, abs=1e-10)


# Lemmas 2 to 5 and Theorem 2: S_CCA = γ₁γ₂γ₃ / √c · S_Atom.


def lost(a: Matrix, b: Matrix) -> float:
    """Δ₁ of lemma 2: Σ ‖row i of A‖² ‖column j of B‖² sin² of their angle."""
    rows, columns = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0)
    cosines = (a @ b) / np.outer(rows, columns)
    return float((np.outer(rows, columns) ** 2 * (1 - cosines**2)).sum())


def lost_of_three(a: Matrix, b: Matrix, c: Matrix) -> float:
    """Δ₂ + Δ₃ of lemma 4."""
    second = np.sum(a**2) * lost(b, c) + np.sum(c**2) * lost(a, b)
    return (second + lost(a, b @ c) + lost(a @ b, c)) / 2


def test_lemmas_2_to_4_are_identities() -> None:
    a, b, c = normal(4, 5, seed=0), normal(5, 3, seed=1), normal(3, 6, seed=2)
    size = np.linalg.norm
    product = size(a) * size(b)
    assert size(a @ b) == pytest.approx(product * np.sqrt(1 - lost(a, b) / product**2))
    product *= size(c)
    assert size(a @ b @ c) == pytest.approx(product * np.sqrt(1 - lost_of_three(a, b, c) / product**2))
    gram = a @ a.T
    half = root(gram)
    assert size(half) == pytest.approx(size(gram) ** 0.5 * (1 + lost(half, half) / size(gram) ** 2) ** 0.25)


def constants(a: Matrix, u: Matrix, v: Matrix, *, printed: bool = False) -> float:
    """γ₁γ₂γ₃ of theorem 2; `printed` takes equation 54's denominator in γ₃ for lemma 3's."""
    grams = [d.T @ a.T @ a @ d for d in (u, v)]
    halves = [root(gram) for gram in grams]
    inverses = [np.linalg.inv(half) for half in halves]
    cross = u.T @ a.T @ a @ v
    size = np.linalg.norm
    first = np.prod([size(half) * size(inverse) for half, inverse in zip(halves, inverses, strict=True)])
    whole = size(inverses[0]) ** 2 * size(cross) ** 2 * size(inverses[1]) ** 2
    second = np.sqrt(1 - lost_of_three(inverses[0], cross, inverses[1]) / whole)
    third = 1.0
    for gram, half in zip(grams, halves, strict=True):
        third *= (1 + lost(half, half) / size(half if printed else gram) ** 2) ** -0.25
    return float(first * second * third)


def features_alike(a: Matrix, u: Matrix, v: Matrix) -> float:
    """‖ZᵤᵀZᵥ‖ / √(‖ZᵤᵀZᵤ‖ ‖ZᵥᵀZᵥ‖): what equation 53 comes to with lemma 3."""
    z, y = a @ u, a @ v
    return float(np.linalg.norm(z.T @ y) / np.sqrt(np.linalg.norm(z.T @ z) * np.linalg.norm(y.T @ y)))


def pairs() -> list[tuple[Matrix, Matrix, Matrix]]:
    """One layer on one set of images, and pairs of models whose atoms are more or less alike."""
    a = normal(300, 9, seed=0) @ np.diag(np.linspace(0.5, 2, 9))
    found = []
    for seed in range(12):
        u = normal(9, 4, seed=seed)
        found.append((a, u, np.linspace(0.2, 2, 12)[seed] * u + normal(9, 4, seed=50 + seed)))
    return found


def test_theorem_2_is_an_identity_of_features_not_of_atoms() -> None:
    for a, u, v in pairs():
        exact = constants(a, u, v) / 2 * features_alike(a, u, v)  # √c = 2
        assert cca(a @ u, a @ v) == pytest.approx(exact, rel=1e-8)
        misprinted = constants(a, u, v, printed=True) / 2 * features_alike(a, u, v)
        assert abs(misprinted / exact - 1) > 0.01


def test_the_constants_of_theorem_2_vary_from_pair_to_pair() -> None:
    values = np.array([constants(*pair) for pair in pairs()])
    assert values.max() / values.min() > 1.5
    needed = np.array([2 * cca(a @ u, a @ v) / cosine(u, v) for a, u, v in pairs()])
    assert needed.max() / needed.min() > 2, "one constant for all pairs would make the theorem a linear relation"
    off = np.abs(values / needed - 1)
    assert off.max() > 0.3, "and where the constants are known they are not those that the atoms need"


def test_equation_55_takes_a_frobenius_norm_for_a_trace() -> None:
    u = orthonormal(9, 4, seed=0)
    frobenius = np.linalg.norm(u.T @ u) / (np.linalg.norm(u) ** 2)
    assert frobenius == pytest.approx(1 / 2)  # 1/√m of a model with itself
    assert cosine(u, u) == pytest.approx(1)
    assert np.trace(u.T @ -u) == pytest.approx(-4)
    assert np.linalg.norm(u.T @ -u) == pytest.approx(2)


# What the cosine depends on.


def test_the_same_networks_in_other_coefficients_have_another_cosine() -> None:
    random = torch.Generator().manual_seed(0)
    layers = [AtomConv2d(3, 5, 3, 4, dtype=torch.float64).requires_grad_(False) for _ in range(2)]
    for layer in layers:
        layer.atoms.copy_(torch.randn(4, 3, 3, generator=random, dtype=torch.float64))
    layers[1].coefficients.copy_(layers[0].coefficients)
    turn = torch.randn(4, 4, generator=random, dtype=torch.float64)
    turned = copy.deepcopy(layers)
    for layer in turned:
        layer.coefficients.copy_(layer.coefficients @ torch.linalg.inv(turn))
        layer.atoms.copy_((turn @ layer.atoms.flatten(1)).view_as(layer.atoms))
    x = torch.randn(2, 3, 8, 8, generator=random, dtype=torch.float64)
    for before, after in zip(layers, turned, strict=True):
        torch.testing.assert_close(before(x), after(x))
    cosines, spans = (
        [sosie.measure(name, *(layer.atoms for layer in each)) for each in (layers, turned)]
        for name in ("atom_cosine", "atom_grassmann")
    )
    assert abs(cosines[0] - cosines[1]) > 0.1
    assert spans[0] == pytest.approx(spans[1], abs=1e-10)


def test_with_orthonormal_coefficients_it_is_the_cosine_of_the_weights() -> None:
    alpha = orthonormal(40, 6, seed=0)
    u, v = normal(9, 6, seed=1), normal(9, 6, seed=2)
    assert cosine(u, v) == pytest.approx(sosie.measure("weight_cosine", alpha @ u.T, alpha @ v.T), abs=1e-12)
    skewed = normal(40, 6, seed=3) @ np.diag([3, 1, 1, 1, 1, 0.1])
    assert abs(cosine(u, v) - sosie.measure("weight_cosine", skewed @ u.T, skewed @ v.T)) > 0.05
