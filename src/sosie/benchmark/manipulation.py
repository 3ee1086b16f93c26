"""Manipulation: how far a value moves while answers stay the same, and whether it moves when they break."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..measures import linear_cka
from ..stats import Sample
from .candidates import Candidate, values_of
from .population import last_hidden

FACTORS = 10.0  # neurons are rescaled by up to this, or its inverse
SHARE = 0.1  # of the rows are translated
DISTANCES = (1.0, 10.0, 100.0)  # times the root mean square length of a row; the farthest a value is moved counts
STEPS = 200  # of the search for a self-map


@dataclass(frozen=True)
class Behaviour:
    """What a network does with the images; without a model where its activations alone were changed."""

    rows: Tensor  # (n, p) at the last hidden layer
    answers: Tensor  # (n,)
    model: nn.Module | None

    @classmethod
    def of(cls, model: nn.Sequential, images: Tensor) -> Behaviour:
        return cls(last_hidden(model, images), model(images).argmax(1), model)


# Changes a copy of a network, and returns it; or returns activations, at several strengths; None: it cannot be done.
Make = Callable[[nn.Sequential, Tensor, torch.Generator], nn.Sequential | list[Tensor] | None]


@dataclass(frozen=True)
class Manipulation:
    """A change to a network, and whether it is meant to keep what the network computes."""

    name: str
    keeps: bool
    about: str
    make: Make


MANIPULATIONS: list[Manipulation] = []


def _manipulation(name: str, about: str, *, keeps: bool) -> Callable[[Make], Make]:
    def declare(make: Make) -> Make:
        MANIPULATIONS.append(Manipulation(name, keeps, about, make))
        return make

    return declare


def _layers(model: nn.Sequential) -> list[nn.Linear]:
    return [part for part in model if isinstance(part, nn.Linear)]


@_manipulation("permuted", "the neurons of every hidden layer in another order", keeps=True)
def _permute(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    for layer, after in itertools.pairwise(_layers(model)):
        order = torch.randperm(layer.out_features, generator=random).to(layer.weight.device)
        layer.weight.copy_(layer.weight[order])
        layer.bias.copy_(layer.bias[order])
        after.weight.copy_(after.weight[:, order])
    return model


@_manipulation("rescaled", f"every neuron times 1/{FACTORS:g} to {FACTORS:g}, its readers by the inverse", keeps=True)
def _rescale(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    model.double()
    for layer, after in itertools.pairwise(_layers(model)):
        factor = FACTORS ** (2 * torch.rand(layer.out_features, generator=random, dtype=torch.float64) - 1)
        factor = factor.to(layer.weight.device)
        layer.weight.mul_(factor[:, None])
        layer.bias.mul_(factor)
        after.weight.div_(factor)
    return model.float()


@_manipulation("dark pixels", "random weights, as large as the rest, on pixels that are 0 in all images", keeps=True)
def _dark_pixels(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential | None:
    dark = (images.flatten(1) == 0).all(0)
    if not bool(dark.any()):
        return None
    weight = _layers(model)[0].weight
    noise = torch.randn(weight.shape, generator=random).to(weight.device) * dark
    weight.add_(noise * (weight.norm() / noise.norm()))
    return model


def _unread(model: nn.Sequential) -> Tensor | None:
    """(p, k): orthonormal directions of the last hidden layer that the output layer does not read."""
    weight = _layers(model)[-1].weight.double()
    k = weight.shape[1] - weight.shape[0]
    return torch.linalg.svd(weight).Vh[weight.shape[0] :].T if k > 0 else None


@_manipulation(
    "translated rows",
    f"{SHARE:.0%} of the rows moved along a direction that the output layer does not read, by {DISTANCES[0]:g} to "
    f"{DISTANCES[-1]:g} times their length",
    keeps=True,
)
def _translate_rows(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Tensor] | None:
    """Davari et al. 2023: a subset of the rows moved away, here along a direction that the output does not read."""
    unread, rows = _unread(model), last_hidden(model, images)
    if unread is None:
        return None
    chosen = torch.randperm(len(images), generator=random)[: max(1, round(SHARE * len(images)))].to(images.device)
    lengths = torch.zeros_like(rows[:, :1])
    lengths[chosen] = rows.square().sum(1).mean().sqrt()
    return [rows + distance * lengths * unread[:, 0] for distance in DISTANCES]


@_manipulation("self-map", "a linear map, unread by the output layer, sought so that linear CKA is least", keeps=True)
def _self_map(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential | None:
    """A linear map of the last hidden layer, x + N Bᵀx with N unread, B sought so that linear CKA with x is least."""
    unread, rows = _unread(model), last_hidden(model, images)
    if unread is None:
        return None
    start = torch.randn(rows.shape[1], unread.shape[1], generator=random, dtype=torch.float64).to(rows.device)
    b = (0.1 * start).requires_grad_()
    stepper = torch.optim.Adam([b], lr=0.05)
    with torch.enable_grad():
        for _ in range(STEPS):
            stepper.zero_grad()
            linear_cka.from_sample(Sample.of(rows + rows @ b @ unread.T, rows)).backward()
            stepper.step()
    return _with_map(model, torch.eye(rows.shape[1]).to(rows) + b.detach() @ unread.T)


@_manipulation("classes rolled", "the output layer names the next class", keeps=False)
def _roll_classes(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    last = _layers(model)[-1]
    last.weight.copy_(last.weight.roll(1, 0))
    last.bias.copy_(last.bias.roll(1))
    return model


@_manipulation("biased", "the output layer's bias names one class always", keeps=False)
def _bias(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    outputs = model(images)
    _layers(model)[-1].bias[0] += outputs.amax() - outputs.amin() + 1
    return model


@_manipulation("rotated", "the last hidden layer rotated at random, the output layer as before", keeps=False)
def _rotate(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    width = _layers(model)[-1].in_features
    turn = torch.linalg.qr(torch.randn(width, width, generator=random, dtype=torch.float64)).Q
    return _with_map(model, turn.to(images.device))


@_manipulation("one direction", "all but the first principal component of the last hidden layer deleted", keeps=False)
def _one_direction(model: nn.Sequential, images: Tensor, random: torch.Generator) -> nn.Sequential:
    """Ding et al. 2021 delete principal components; all but the first are deleted here, about the mean."""
    rows = last_hidden(model, images)
    mean = rows.mean(0)
    first = torch.linalg.svd(rows - mean, full_matrices=False).Vh[0]
    kept = torch.outer(first, first)
    return _with_map(model, kept, mean - mean @ kept)


def _with_map(model: nn.Sequential, matrix: Tensor, bias: Tensor | None = None) -> nn.Sequential:
    """The network with a linear layer x ↦ x M + b before its last, which now is its last hidden layer."""
    p, q = matrix.shape
    layer = nn.Linear(p, q, bias=bias is not None, device=matrix.device).requires_grad_(False)
    layer.weight.copy_(matrix.T)
    if bias is not None:
        layer.bias.copy_(bias)
    return nn.Sequential(*list(model)[:-1], layer, model[-1]).eval()


class Bench:
    """Networks before and after each manipulation, made once for all measures."""

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Sequential], images: Tensor, *, seed: int) -> None:
        self.images, self.inputs = images, images.flatten(1).double()
        self.before = [Behaviour.of(model, images) for model in models]
        self.changed: dict[str, list[list[Behaviour] | None]] = {each.name: [] for each in MANIPULATIONS}
        for manipulation, (k, model) in itertools.product(MANIPULATIONS, enumerate(models)):
            made = manipulation.make(copy.deepcopy(model), images, torch.Generator().manual_seed(seed + k))
            if isinstance(made, nn.Sequential):
                after: list[Behaviour] | None = [Behaviour.of(made, images)]
            else:
                read_out = copy.deepcopy(model[-1]).double()
                after = None if made is None else [Behaviour(rows, read_out(rows).argmax(1), None) for rows in made]
            self.changed[manipulation.name].append(after)

    def agreement(self, name: str) -> float | None:
        """The least share of images, over networks and strengths, that are answered as before."""
        shares = [
            float((changed.answers == before.answers).double().mean())
            for before, every in zip(self.before, self.changed[name], strict=True)
            for changed in every or ()
        ]
        return min(shares) if shares else None


def manipulate(candidate: Candidate, far: float | None, bench: Bench) -> dict[str, Any]:
    """For each manipulation the value, and how far it moved: 0 is a network with itself, 1 untrained networks.

    `far` is the mean value of untrained networks. Of several strengths and networks the largest move counts where
    the function stays; where it breaks, the mean over networks.
    """
    same = [_value(candidate, before, before, bench) for before in bench.before]
    outcomes = {each.name: _outcome(candidate, each, same, far, bench) for each in MANIPULATIONS}
    return {"same": float(np.mean(same)), "far": far, "manipulations": outcomes}


def _outcome(
    candidate: Candidate, manipulation: Manipulation, same: list[float], far: float | None, bench: Bench
) -> dict[str, Any]:
    facts = {"keeps": manipulation.keeps, "about": manipulation.about, "agreement": bench.agreement(manipulation.name)}
    values, moves = [], []
    try:
        for own, before, every in zip(same, bench.before, bench.changed[manipulation.name], strict=True):
            if every is None:
                return facts | {"why": "cannot be done to these networks and images"}
            if candidate.of == "models" and any(changed.model is None for changed in every):
                return facts | {"why": "is done to activations; the measure reads networks"}
            moved_to = [_value(candidate, before, changed, bench) for changed in every]
            values.append(max(moved_to, key=lambda value, own=own: abs(value - own)))  # type: ignore[misc]
            if far is not None and abs(own - far) > 1e-6 * max(abs(own), abs(far)):
                moves.append((own - values[-1]) / (own - far))
    except Exception as error:
        return facts | {"why": f"{type(error).__name__}: {error}"}
    if len(moves) < len(values):
        why = "untrained networks have the value of a network with itself: there is no scale for how far it moved"
        return facts | {"value": float(np.mean(values)), "why": why}
    moved = max(moves, key=abs) if manipulation.keeps else float(np.mean(moves))
    return facts | {"value": float(np.mean(values)), "moved": float(moved)}


def _value(candidate: Candidate, before: Behaviour, after: Behaviour, bench: Bench) -> float:
    things: Any = [side.rows[: candidate.rows] for side in (before, after)]
    if candidate.of == "models":
        things = [before.model, after.model]
    pair = values_of(candidate, things, [(0, 1)], inputs=bench.inputs[: candidate.rows])
    if not pair.defined[0]:
        raise ValueError(next(iter(pair.reasons)))
    return float(pair.values[0])
