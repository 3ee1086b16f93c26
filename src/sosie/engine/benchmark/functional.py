"""What networks do: the share of images on which two of them agree, under each condition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...data.attacks import attack
from ...data.corruptions import corrupt
from ...progress import track
from .population import Images, Population
from .scales import Scale
from .store import Store

CLEAN, CORRUPTED, ATTACKED, ALL = "clean", "corrupted", "attacked", "all"
GROUPS = (ALL, CLEAN, CORRUPTED, ATTACKED)  # those that have conditions
Agreement = dict[str, np.ndarray]  # condition -> (models, models), NaN for two that are not paired


def agreements(scale: Scale, images: Images, population: Population, store: Store, *, seed: int) -> Agreement:
    """For each condition how far two networks agree; the mean of a group of conditions under the group's name."""
    found: Agreement = {}
    pairs = sorted({pair for blocks in population.blocks.values() for block in blocks for pair in block.pairs})
    conditions = [CLEAN, *scale.corruptions, *(f"attack: {a}" for a in scale.attacks)]
    for condition in track(conditions, "agreement of networks", len(conditions), "conditions"):
        values = store.json(
            f"agreement/{condition.replace('attack: ', 'attack-').partition('(')[0]}",
            lambda c=condition: {"values": _agreement(c, images, population, pairs, seed)},  # type: ignore[misc]
        )["values"]
        found[condition] = matrix = np.full((len(population.models),) * 2, np.nan)
        for (a, b), value in zip(pairs, values, strict=True):
            matrix[a, b] = matrix[b, a] = value
    for group, names in groups(scale).items():
        found[group] = np.mean([found[name] for name in names], axis=0)
    return found


def groups(scale: Scale) -> dict[str, list[str]]:
    """Which conditions a group is the mean of."""
    corrupted, attacked = list(scale.corruptions), [f"attack: {a}" for a in scale.attacks]
    found = {CLEAN: [CLEAN], CORRUPTED: corrupted, ATTACKED: attacked, ALL: [CLEAN, *corrupted, *attacked]}
    return {group: names for group, names in found.items() if names}


def _agreement(
    condition: str, images: Images, population: Population, pairs: Sequence[tuple[int, int]], seed: int
) -> list[float]:
    if condition.startswith("attack: "):
        return _under_attack(condition.removeprefix("attack: "), images, population.models, pairs, seed)
    x = probing_images(condition, images, seed)
    answers = torch.stack([predictions(model, x) for model in population.models])
    return [float((answers[a] == answers[b]).double().mean()) for a, b in pairs]


def _under_attack(
    kind: str, images: Images, models: Sequence[nn.Module], pairs: Sequence[tuple[int, int]], seed: int
) -> list[float]:
    """Attack A and ask both, attack B and ask both; the mean."""
    partners: dict[int, list[int]] = {}
    for a, b in pairs:
        partners.setdefault(a, []).append(b)
        partners.setdefault(b, []).append(a)
    found: dict[tuple[int, int], Tensor] = {}
    for a in track(partners, f"attacking by {kind}", len(partners), "networks"):
        x = attack(models[a], images.test, images.test_labels, kind, seed=seed)
        own = predictions(models[a], x)
        for b in partners[a]:
            found[a, b] = (own == predictions(models[b], x)).double().mean()
    return [float(found[a, b] + found[b, a]) / 2 for a, b in pairs]


def probing_images(kind: str, images: Images, seed: int) -> Tensor:
    """The test images, as they are or corrupted."""
    return images.test if kind == CLEAN else corrupt(images.test, kind, seed=seed)


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)
