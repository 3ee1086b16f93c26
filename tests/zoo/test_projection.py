"""How far short vectors are off, over many seeds, against the stated bounds; data-free ones against wCKA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.engine.network import Network
from sosie.linalg import u_centred
from sosie.zoo import Probe
from sosie.zoo import fingerprints as projection
from sosie.zoo.fingerprints import linear_vectors, project, standard_deviation

SEEDS = 400


def pair_with_cosine(c: float, length: int = 2016) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.linalg.qr(torch.randn(length, 2, generator=generator, dtype=torch.float64))[0].T
    return torch.stack([x, c * x + (1 - c * c) ** 0.5 * y])


def cosines(vectors: Tensor, size: int) -> np.ndarray:
    found = [project(vectors, size, seed).double() for seed in range(SEEDS)]
    return np.array([float(short[0] @ short[1]) for short in found])


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("c", [0.0, 0.5, 0.9, -0.6])
def test_the_error_is_what_is_stated(c: float, size: int) -> None:
    found = cosines(pair_with_cosine(c), size)
    stated = standard_deviation(c, size)
    # Of SEEDS draws a standard deviation is known to 1/√(2 SEEDS) of itself: four of these, and terms of 1/size.
    assert found.std() <= stated * (1 + 4 / (2 * SEEDS) ** 0.5 + 2 / size)
    assert found.std() >= stated * (1 - 4 / (2 * SEEDS) ** 0.5 - 2 / size)
    bias = abs(c) * (1 - c * c) / (2 * size)
    assert abs(found.mean() - c) <= bias + 4 * stated / SEEDS**0.5


def test_a_few_heavy_entries_do_not_break_the_bound() -> None:
    x, y = pair_with_cosine(0.3)
    x, y = x.clone(), y.clone()
    x[:3] += 0.6
    y[1:4] += 0.6
    pair = torch.stack([x / x.norm(), y / y.norm()])
    c = float(pair[0] @ pair[1])
    assert cosines(pair, 256).std() <= standard_deviation(c, 256) * (1 + 4 / (2 * SEEDS) ** 0.5 + 2 / 256)


def test_entries_of_one_sign_do_not_pile_up() -> None:
    """Added up without signs, vectors of positive entries would all look alike."""
    x, y = pair_with_cosine(0.0)
    pair = torch.stack([x.abs(), (y * (torch.arange(len(y)) % 8 == 0)).abs()])
    pair = pair / pair.norm(dim=1, keepdim=True)
    c, found = float(pair[0] @ pair[1]), cosines(pair, 64)
    assert found.std() <= standard_deviation(c, 64) * (1 + 4 / (2 * SEEDS) ** 0.5 + 2 / 64)
    assert abs(found.mean() - c) <= c * (1 - c * c) / 128 + 4 * standard_deviation(c, 64) / SEEDS**0.5


def test_the_same_for_every_call_and_another_for_another_seed() -> None:
    vectors = pair_with_cosine(0.5)
    torch.manual_seed(3)
    first = project(vectors, 128, 5)
    assert torch.equal(first, project(vectors, 128, 5))
    assert torch.equal(first[1:], project(vectors[1:], 128, 5))
    assert not torch.equal(first, project(vectors, 128, 6))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(2))


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.T


def collection(sites: int = 400, probes: int = 64) -> Tensor:
    """Whole vectors of sites that see more or less of the same twelve directions."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(probes, 12, generator=generator, dtype=torch.float64)
    found = []
    for _ in range(sites):
        seen = latent * torch.rand(12, generator=generator, dtype=torch.float64) ** 3
        rows = seen @ torch.randn(12, 40, generator=generator, dtype=torch.float64)
        gram = u_centred(_gram(rows + 0.3 * torch.randn(probes, 40, generator=generator, dtype=torch.float64)))
        found.append(gram[tuple(torch.triu_indices(probes, probes, 1))])
    vectors = torch.stack(found)
    return vectors / vectors.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_neighbours_are_found_again(size: int) -> None:
    whole = collection()
    short = project(whole, size, seed=0).double()
    exact, estimate = whole @ whole.T, short @ short.T
    exact.fill_diagonal_(-1)
    estimate.fill_diagonal_(-1)
    nearest, few = exact.topk(10).indices, estimate.topk(50).indices
    ranked = few.gather(1, exact.gather(1, few).topk(10).indices)
    recall = (ranked[:, :, None] == nearest[:, None]).any(2).double().mean()
    alone = (estimate.topk(10).indices[:, :, None] == nearest[:, None]).any(2).double().mean()
    assert recall >= 0.95
    assert alone < recall  # the short vectors alone are no substitute


def small_nets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(12, w), nn.ReLU(), nn.Linear(w, 4)) for w in (5, 9)]


def test_linear_vectors_have_wcka_as_their_mean() -> None:
    nets, probe, found = small_nets(), Probe.of(torch.ones(4, 12)), []
    for seed in range(60):
        each = [linear_vectors(Network(net, "net"), probe, seed=seed)[0] for net in nets]
        made = [torch.stack(list(vectors.values())) for vectors in each]
        found.append((made[0] @ made[1].T).numpy())
    expected = sosie.compare_weights(*nets).matrix("wcka")
    assert made[0].shape == (3, 2 * 128 * 127 // 2)
    error = np.std(found, axis=0) / len(found) ** 0.5
    # A ratio of two means is off by the order of 1/inputs of its variance, which is below the error here.
    assert (np.abs(np.mean(found, axis=0) - expected) < 4 * error).all()
    assert (error < 0.01).all()


@pytest.mark.parametrize("length", [100, 3000])
def test_many_vectors_are_taken_a_few_at_a_time(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(40, length, generator=torch.Generator().manual_seed(0))
    whole = project(vectors)
    monkeypatch.setattr(projection, "AT_ONCE", 2 * length + 1)
    assert torch.equal(project(vectors), whole)
