"""Grounding: does the measure say what the networks do? Correlations with the share of images they agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from ...results import Closer
from .candidates import Candidate
from .correlations import bootstrap, meng, pearson, percentile_interval, spearman
from .functional import GROUPS, Agreement
from .population import Block, Population, last_hidden
from .scales import Scale
from .values import Clock, Found, values_of

TOGETHER = 32  # networks whose activations are compared in one go
COEFFICIENTS = {"pearson": pearson, "spearman": spearman}


class Undefined(ValueError):
    """The measure has no value for any pair of a kind: that is how it is defined, and no failure."""


class Ground:
    """The pairs of networks, their activations at the last hidden layer for clean images, and how far they agree."""

    def __init__(
        self, scale: Scale, population: Population, agreement: Agreement, images: Tensor, *, seed: int
    ) -> None:
        self.scale, self.population, self.agreement, self.seed = scale, population, agreement, seed
        self.inputs = images.flatten(1).double()
        self.activations = [last_hidden(model, images) for model in population.models]

    def pairs(self, kind: str) -> np.ndarray:
        """(pairs, 2) numbers of networks."""
        return np.array([pair for block in self.population.blocks[kind] for pair in block.pairs]).reshape(-1, 2)

    def values(self, candidate: Candidate, kind: str) -> Found:
        """In lots of blocks, in a seeded order: what a budget that runs out leaves done is a fair share."""
        blocks, clock = self.population.blocks[kind], Clock(self.scale.budget)
        order = np.random.default_rng(self.seed).permutation(len(blocks)).tolist()
        values = np.full(len(self.pairs(kind)), np.nan)
        reasons: Counter[str] = Counter()
        ends = np.cumsum([len(block.pairs) for block in blocks])
        for lot in _lots(order, [len(block.members) for block in blocks]):
            found = self._of_blocks(candidate, [blocks[k] for k in lot], clock)
            places = np.concatenate([np.arange(ends[k] - len(blocks[k].pairs), ends[k]) for k in lot])
            values[places] = found.values
            reasons += found.reasons
        return Found(values, reasons)

    def _of_blocks(self, candidate: Candidate, blocks: Sequence[Block], clock: Clock) -> Found:
        members = [member for block in blocks for member in block.members]
        place = {member: number for number, member in enumerate(members)}
        pairs = [(place[a], place[b]) for block in blocks for a, b in block.pairs]
        if candidate.of == "models":
            return values_of(candidate, [self.population.models[m] for m in members], pairs, clock=clock)
        things = [self.activations[m][: candidate.rows] for m in members]
        return values_of(candidate, things, pairs, inputs=self.inputs[: candidate.rows], clock=clock)

    def runs(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """The training runs that the networks of each pair are from: what the bootstrap draws."""
        runs, pairs = np.array(self.population.runs), self.pairs(kind)
        return runs[pairs[:, 0]], runs[pairs[:, 1]]

    def agreed(self, kind: str, condition: str) -> np.ndarray:
        pairs = self.pairs(kind)
        return self.agreement[condition][pairs[:, 0], pairs[:, 1]]


def _lots(order: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Blocks in this order, together as long as they are few networks: what is kept of each takes memory."""
    lot: list[int] = []
    for k in order:
        if lot and sum(sizes[one] for one in lot) + sizes[k] > TOGETHER:
            yield lot
            lot = []
        lot.append(k)
    if lot:
        yield lot


def ground(candidate: Candidate, closer: Closer, at: Ground, kind: str) -> dict[str, Any]:
    """Correlations over the pairs of one kind: with intervals for groups of conditions, plain ones for each alone."""
    found = at.values(candidate, kind)
    kept = found.defined
    if not kept.any():
        why = found.reasons.most_common(1)[0][0] if found.reasons else "there are no pairs"
        if Clock(at.scale.budget).reason in found.reasons:
            raise ValueError(f"no pair of networks that differ in {kind} has a value: {why}")
        raise Undefined(f"not defined for networks that differ in {kind}: {why}")
    oriented = found.values[kept] * (1 if closer == "up" else -1)
    units = tuple(side[kept] for side in at.runs(kind))
    agreed = {name: at.agreed(kind, name)[kept] for name in at.agreement}
    groups = {n: _correlations(oriented, agreed[n], (units[0], units[1]), at) for n in GROUPS if n in agreed}
    alone = {name: _plain(oriented, y) for name, y in agreed.items() if name not in GROUPS}
    return {
        "values": found.values,
        "pairs": len(kept),
        "defined": int(kept.sum()),
        "undefined": dict(found.reasons.most_common(3)),
        "groups": groups,
        "conditions": alone,
    }


def _correlations(x: np.ndarray, y: np.ndarray, units: tuple[np.ndarray, np.ndarray], at: Ground) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {}
        for name, coefficient in COEFFICIENTS.items():
            draws = bootstrap(x, y, units, ranks=name == "spearman", draws=at.scale.draws, seed=at.seed)
            reach = percentile_interval(draws)
            found[name] = asdict(coefficient(x, y)) | {"over_models": None if reach is None else list(reach)}
        return found
    except ValueError as error:
        return {"why": str(error)}


def _plain(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    try:
        return {name: coefficient(x, y).value for name, coefficient in COEFFICIENTS.items()}
    except ValueError as error:
        return {"why": str(error)}


def difference(
    first: np.ndarray, second: np.ndarray, at: Ground, kind: str, condition: str, *, ranks: bool
) -> dict[str, Any]:
    """Whether one measure's correlation exceeds another's, on the pairs where both are defined; values oriented.

    The p-value is that of Meng, Rosenthal and Rubin, for pairs as if independent; the interval is of the bootstrap
    over training runs.
    """
    kept = np.isfinite(first) & np.isfinite(second)
    x, other, y = first[kept], second[kept], at.agreed(kind, condition)[kept]
    one_unit, other_unit = (side[kept] for side in at.runs(kind))
    coefficient = spearman if ranks else pearson
    try:
        own, against, between = (coefficient(u, v).value for u, v in ((x, y), (other, y), (x, other)))
        drawn = [
            bootstrap(v, y, (one_unit, other_unit), ranks=ranks, draws=at.scale.draws, seed=at.seed) for v in (x, other)
        ]
        reach = percentile_interval(drawn[0] - drawn[1])
        p = 1.0 if own == against else meng(own, against, between, len(x)).p
    except ValueError as error:
        return {"why": str(error)}
    return {"value": own - against, "p": p, "over_models": None if reach is None else list(reach), "n": len(x)}
