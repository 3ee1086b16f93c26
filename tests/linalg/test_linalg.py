"""Centring, Gram matrices and spectra against plain NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sosie.linalg import (
    Invariants,
    Spectrum,
    block_stacks,
    centred,
    centred_diagonal,
    diagonal_part,
    double_centred,
    gram_stack,
    inverse_root,
    nuclear_norm,
    permuted_moments,
    u_centred,
)


def rows(n: int, p: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_double_centring_is_what_centring_the_rows_gives() -> None:
    x = rows(9, 4) + 3
    assert torch.allclose(double_centred(x @ x.T), centred(x) @ centred(x).T)
    assert torch.allclose(centred_diagonal(x @ x.T), double_centred(x @ x.T).diagonal())


def test_u_centring_gives_songs_unbiased_estimate() -> None:
    """HSIC_u = (tr KL + 1ᵀK1 1ᵀL1 / ((n−1)(n−2)) − 2 1ᵀKL1 / (n−2)) / (n (n−3)), diagonals left out."""
    x, y = rows(12, 3), rows(12, 5, seed=1)
    k, l = ((s @ s.T).numpy() * (1 - np.eye(12)) for s in (x, y))
    song = np.trace(k @ l) + k.sum() * l.sum() / (11 * 10) - 2 * (k @ l).sum() / 10
    assert float((u_centred(x @ x.T) * u_centred(y @ y.T)).sum()) == pytest.approx(song)


def test_diagonal_part_links_both_estimates() -> None:
    x, y = rows(12, 3) + 2, rows(12, 5, seed=1)
    k, l = (centred(s) @ centred(s).T for s in (x, y))
    unbiased = (u_centred(x @ x.T) * u_centred(y @ y.T)).sum()
    added = diagonal_part((k.diagonal() * l.diagonal()).sum(), k.trace(), l.trace(), 12)
    assert float(unbiased + added) == pytest.approx(float((k * l).sum()))


def test_u_centring_needs_four_rows() -> None:
    with pytest.raises(ValueError, match="at least 4 rows, got 3"):
        u_centred(torch.eye(3))


@pytest.mark.parametrize(
    ("n", "expected"),
    [(128, [(2, 64)]), (130, [(1, 64), (1, 66)]), (100, [(1, 100)]), (40, [(1, 40)]), (64, [(1, 64)])],
)
def test_a_remainder_joins_the_last_block(n: int, expected: list[tuple[int, int]]) -> None:
    x = rows(n, 3)
    stacks = block_stacks(x, 64)
    assert [stack.shape[:2] for stack in stacks] == expected
    assert torch.equal(torch.cat([stack.reshape(-1, 3) for stack in stacks]), x)


@pytest.mark.parametrize("b", [5, 64, 128, 130])
def test_gram_of_blocks(b: int) -> None:
    for blocks, width in ((3, 7), (3, 4 * b + 3), (1, 4 * b + 4), (1, 4 * b + 5)):
        stack = rows(blocks * b, width).reshape(blocks, b, width)
        assert torch.allclose(gram_stack(stack), stack @ stack.transpose(1, 2))


def test_spectrum_leaves_out_what_is_rounding() -> None:
    x = rows(30, 4)
    x = torch.cat([x, x[:, :2]], dim=1)  # rank 4
    spectrum = Spectrum.of(x.T @ x)
    assert spectrum.rank == 4
    assert torch.all(spectrum.values[:-1] >= spectrum.values[1:])
    assert torch.allclose(spectrum.whitening.T @ x.T @ x @ spectrum.whitening, torch.eye(4, dtype=x.dtype))
    assert Spectrum.of(torch.zeros(3, 3, dtype=torch.float64)).rank == 0


def test_leading_keeps_the_fewest_directions() -> None:
    spectrum = Spectrum.of(torch.diag(torch.tensor([6.0, 3.0, 1.0], dtype=torch.float64)))
    assert [spectrum.leading(share).rank for share in (0.5, 0.6, 0.61, 0.9, 0.91, 1.0)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("repeated", [False, True])
def test_inverse_root_and_its_gradient(repeated: bool) -> None:
    """Equal eigenvalues, where the gradient of eigh is infinite, and a missing direction."""
    values = torch.tensor([2.0, 2.0, 1.0, 0.0] if repeated else [3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    basis = torch.linalg.qr(rows(4, 4)).Q
    matrix = (basis * values) @ basis.T
    root = inverse_root(matrix)
    projector = basis[:, :3] @ basis[:, :3].T
    assert torch.allclose(root @ matrix @ root, projector)

    def inside(change: torch.Tensor) -> torch.Tensor:
        """A change that stays within the range, where the function is smooth."""
        kept = basis[:, :3]
        return (inverse_root(matrix + kept @ (change + change.T) @ kept.T) * (basis @ basis.T + projector)).sum()

    change = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(inside, (change,), eps=1e-6, atol=1e-6)


def test_nuclear_norm() -> None:
    x = rows(5, 3)
    assert float(nuclear_norm(x)) == pytest.approx(np.linalg.svd(x.numpy(), compute_uv=False).sum())


def test_mean_and_variance_over_all_permutations() -> None:
    random = torch.Generator().manual_seed(0)

    def kernel(width: int) -> torch.Tensor:
        x = torch.randn(6, width, generator=random, dtype=torch.float64) ** 3
        x = x - x.mean(0)
        return x @ x.T

    k, l = kernel(2), kernel(3)
    every = torch.stack([(k * l[list(o)][:, list(o)]).sum() for o in itertools.permutations(range(6))])
    of_k, of_l = (Invariants(m.trace(), m.square().sum(), m.diagonal().square().sum()) for m in (k, l))
    mean, variance = permuted_moments(of_k, of_l, 6)
    assert float(mean) == pytest.approx(float(every.mean()), rel=1e-12)
    assert float(variance) == pytest.approx(float(every.var(unbiased=False)), rel=1e-10)
