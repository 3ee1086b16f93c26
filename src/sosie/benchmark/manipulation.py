"""Manipulation: how far a value moves while the function stays, and whether it moves when the function breaks."""

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
class Changed:
    """A network after manipulation: itself, or only its activations where no network of the kind gives them."""

    rows: Tensor  # (n, p) at the last hidden layer
    answers: Tensor  # (n,)
    model: nn.Module | None


Make = Callable[[nn.Sequential, Tensor, torch.Generator], list[Changed] | None]  # None: it cannot be done here


@dataclass(frozen=True)
class Manipulation:
    """What is done, whether the function is meant to stay, and how."""

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


def _of_model(model: nn.Sequential, images: Tensor) -> Changed:
    with torch.no_grad():
        return Changed(last_hidden(model, images), model(images).argmax(1), model)


def _layers(model: nn.Sequential) -> list[nn.Linear]:
    return [part for part in model if isinstance(part, nn.Linear)]


@_manipulation("permuted", "the neurons of every hidden layer in another order", keeps=True)
def _permuted(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    changed = copy.deepcopy(model)
    for layer, after in itertools.pairwise(_layers(changed)):
        order = torch.randperm(layer.out_features, generator=random).to(layer.weight.device)
        layer.weight.copy_(layer.weight[order])
        layer.bias.copy_(layer.bias[order])
        after.weight.copy_(after.weight[:, order])
    return [_of_model(changed, images)]


@_manipulation("rescaled", f"every neuron times 1/{FACTORS:g} to {FACTORS:g}, its readers by the inverse", keeps=True)
def _rescaled(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    changed = copy.deepcopy(model).double()
    for layer, after in itertools.pairwise(_layers(changed)):
        factor = FACTORS ** (2 * torch.rand(layer.out_features, generator=random, dtype=torch.float64) - 1)
        factor = factor.to(layer.weight.device)
        layer.weight.mul_(factor[:, None])
        layer.bias.mul_(factor)
        after.weight.div_(factor)
    return [_of_model(changed.float(), images)]


@_manipulation("dark pixels", "random weights, as large as the rest, on pixels that are 0 in all images", keeps=True)
def _dark_pixels(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed] | None:
    """Weights on inputs that are 0 in every image may be anything."""
    dark = (images.flatten(1) == 0).all(0)
    if not bool(dark.any()):
        return None
    changed = copy.deepcopy(model)
    first = _layers(changed)[0]
    noise = torch.randn(first.weight.shape, generator=random).to(first.weight.device)
    size = first.weight.norm() / (noise * dark).norm()
    first.weight.add_(noise * dark * size)
    return [_of_model(changed, images)]


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
def _translated(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed] | None:
    """Davari et al. 2023: a subset of the rows moved away, here along a direction that the output does not read."""
    unread, before = _unread(model), _of_model(model, images)
    if unread is None:
        return None
    chosen = torch.randperm(len(images), generator=random)[: max(1, round(SHARE * len(images)))].to(images.device)
    length = before.rows.square().sum(1).mean().sqrt()
    found = []
    for distance in DISTANCES:
        rows = before.rows.clone()
        rows[chosen] += distance * length * unread[:, 0]
        found.append(Changed(rows, _read_out(model, rows), None))
    return found


@_manipulation("self-map", "a linear map, unread by the output layer, sought so that linear CKA is least", keeps=True)
def _self_map(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed] | None:
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
    return [_of_model(_with_map(model, torch.eye(rows.shape[1]).to(rows) + b.detach() @ unread.T), images)]


@_manipulation("classes rolled", "the output layer names the next class", keeps=False)
def _rolled(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    changed = copy.deepcopy(model)
    last = _layers(changed)[-1]
    last.weight.copy_(last.weight.roll(1, 0))
    last.bias.copy_(last.bias.roll(1))
    return [_of_model(changed, images)]


@_manipulation("biased", "the output layer's bias names one class always", keeps=False)
def _biased(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    changed = copy.deepcopy(model)
    spread = model(images).amax() - model(images).amin()
    _layers(changed)[-1].bias[0] += spread + 1
    return [_of_model(changed, images)]


@_manipulation("rotated", "the last hidden layer rotated at random, the output layer as before", keeps=False)
def _rotated(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    width = _layers(model)[-1].in_features
    turn = torch.linalg.qr(torch.randn(width, width, generator=random, dtype=torch.float64)).Q
    return [_of_model(_with_map(model, turn.to(images.device)), images)]


@_manipulation("one direction", "all but the first principal component of the last hidden layer deleted", keeps=False)
def _one_direction(model: nn.Sequential, images: Tensor, random: torch.Generator) -> list[Changed]:
    """Ding et al. 2021 delete principal components; all but the first are deleted here, about the mean."""
    rows = last_hidden(model, images)
    mean = rows.mean(0)
    first = torch.linalg.svd(rows - mean, full_matrices=False).Vh[0]
    kept = torch.outer(first, first)
    return [_of_model(_with_map(model, kept, mean - mean @ kept), images)]


def _with_map(model: nn.Sequential, matrix: Tensor, bias: Tensor | None = None) -> nn.Sequential:
    """The network with a linear layer x ↦ x M + b before its last, which now is its last hidden layer."""
    p, q = matrix.shape
    layer = nn.Linear(p, q, bias=bias is not None, device=matrix.device).requires_grad_(False)
    layer.weight.copy_(matrix.T)
    if bias is not None:
        layer.bias.copy_(bias)
    parts = [copy.deepcopy(part) for part in model]
    return nn.Sequential(*parts[:-1], layer, parts[-1]).eval()


def _read_out(model: nn.Sequential, rows: Tensor) -> Tensor:
    last = _layers(model)[-1]
    return (rows @ last.weight.double().T + last.bias.double()).argmax(1)


class Bench:
    """Networks with everything that is done to them, made once for all measures."""

    def __init__(self, models: Sequence[nn.Sequential], images: Tensor, *, seed: int) -> None:
        self.models, self.images = models, images
        self.inputs = images.flatten(1).double()
        with torch.no_grad():
            self.before = [_of_model(model, images) for model in models]
            self.changed = {
                m.name: [
                    m.make(model, images, torch.Generator().manual_seed(seed + k)) for k, model in enumerate(models)
                ]
                for m in MANIPULATIONS
            }

    def agreement(self, name: str) -> float | None:
        """The least share of images, over networks and strengths, that are answered as before."""
        shares = [
            float((changed.answers == before.answers).double().mean())
            for before, every in zip(self.before, self.changed[name], strict=True)
            for changed in every or ()
        ]
        return min(shares) if shares else None


def manipulate(candidate: Candidate, far: float | None, bench: Bench) -> dict[str, Any]:
    """For each manipulation the value, and how far it moved: 0 as of the network itself, 1 as of untrained ones.

    `far` is the mean value of untrained networks. Of several strengths and networks the largest move counts where
    the function stays; where it breaks, the mean over networks.
    """
    same = [_value(candidate, before, before, bench) for before in bench.before]
    found: dict[str, Any] = {"same": float(np.mean(same)), "far": far, "manipulations": {}}
    for manipulation in MANIPULATIONS:
        found["manipulations"][manipulation.name] = _tried(candidate, manipulation, same, far, bench)
    return found


def _tried(
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
            found = [_value(candidate, before, changed, bench) for changed in every]
            values.append(max(found, key=lambda value, own=own: abs(value - own)))  # type: ignore[misc]
            if far is not None and abs(own - far) > 1e-6 * max(abs(own), abs(far)):
                moves.append((own - values[-1]) / (own - far))
    except Exception as error:
        return facts | {"why": f"{type(error).__name__}: {error}"}
    if len(moves) < len(values):
        why = "untrained networks have the value of a network with itself: there is no scale to say how far"
        return facts | {"value": float(np.mean(values)), "why": why}
    moved = max(moves, key=abs) if manipulation.keeps else float(np.mean(moves))
    return facts | {"value": float(np.mean(values)), "moved": float(moved)}


def _value(candidate: Candidate, before: Changed, after: Changed, bench: Bench) -> float:
    things: Any = [side.rows[: candidate.rows] for side in (before, after)]
    if candidate.of == "models":
        things = [before.model, after.model]
    found = values_of(candidate, things, [(0, 1)], inputs=bench.inputs[: candidate.rows])
    if not found.defined[0]:
        raise ValueError(next(iter(found.reasons)))
    return float(found.values[0])
