"""Models that keep something from one batch to the next, or that draw random numbers seldom, are noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Skips, cnn, mlp
from torch import Tensor, nn

import sosie


def drifting(n: int = 300) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(0)) + torch.linspace(-3, 3, n)[:, None]


class Adapting(nn.Module):
    """Takes off a running mean of what it has seen."""

    def __init__(self, step: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.step = nn.Linear(6, 8), nn.Linear(8, 3), step
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        out = self.last(z - self.mean)
        self.mean.mul_(1 - self.step).add_(self.step * z.mean(0))
        return out


def notes(estimate, words: str) -> list[str]:
    return [caveat.text for caveat in estimate.caveats if words in caveat.text]


KEEPS = "from one batch to the next"


@pytest.mark.parametrize("batch", [10, 100, 300])
def test_what_is_kept_from_batch_to_batch_is_told(batch: int) -> None:
    model, other = Adapting(), nn.Linear(6, 4)
    c = sosie.compare(model, other, list(drifting().split(batch)), sites_a="last", sites_b=".", measures="linear_cka")
    assert len(notes(c["linear_cka"], KEEPS)) == 1
    assert "Adapting" in notes(c["linear_cka"], KEEPS)[0]


def test_of_outputs_too() -> None:
    model, by_hand = Adapting(), Adapting()
    c = sosie.compare_outputs(model, nn.Linear(6, 3), list(drifting().split(50)))
    assert notes(c["agreement"], KEEPS)
    for batch in drifting().split(50):
        by_hand(batch)
    assert model.mean.allclose(by_hand.mean), "trying it leaves no trace"


def test_a_buffer_that_the_loader_fills_again_is_no_state() -> None:
    buffer = torch.empty(50, 6)

    def batches():
        for part in drifting().split(50):
            yield buffer.copy_(part)

    c = sosie.compare(nn.Linear(6, 5), nn.Linear(6, 4), batches(), sites=".", measures="linear_cka")
    assert not notes(c["linear_cka"], KEEPS)


class Counting(nn.Module):
    """Counts its calls, and nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "width"), [(mlp(0, inputs=6), 6), (Counting(), 6), (Skips(0), 8), (nn.BatchNorm1d(6), 6)]
)
def test_models_that_keep_nothing_are_not_accused(model: nn.Module, width: int) -> None:
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    c = sosie.compare(model, copy.deepcopy(model), list(x.split(30)), measures="linear_cka")
    assert not notes(c["linear_cka"], KEEPS)


def test_convolutions_are_not_accused() -> None:
    x = torch.randn(100, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for measure in ("linear_cka", "mutual_knn"):
        assert not notes(sosie.compare(cnn(0), cnn(1), list(x.split(30)), measures=measure)[measure], KEEPS)


class SometimesSkipped(nn.Module):
    """Leaves a branch out for one input in ten, in evaluation mode too."""

    def __init__(self, share: float = 0.1) -> None:
        super().__init__()
        self.first, self.branch, self.last, self.share = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), share

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        keep = (torch.rand(len(x), 1) > self.share).float()
        return self.last(z + 4 * keep * self.branch(z).tanh())


def test_stochastic_depth_that_stays_on_is_told() -> None:
    torch.manual_seed(0)
    model, x = SometimesSkipped(), torch.randn(300, 6)
    twin, told = copy.deepcopy(model), 0
    for seed in range(20):
        torch.manual_seed(seed)
        c = sosie.compare(model, twin, x, sites="last", measures="linear_cka")
        told += bool(notes(c["linear_cka"], "random"))
    assert told == 20


def test_random_numbers_that_are_drawn_for_nothing_are_not_told() -> None:
    c = sosie.compare(SometimesSkipped(share=-1.0), mlp(1, inputs=6), torch.randn(100, 6), measures="linear_cka")
    assert not notes(c["linear_cka"], "random")
