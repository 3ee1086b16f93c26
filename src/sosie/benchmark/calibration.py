"""Calibration: networks that were never trained should be unlike, consecutive converged checkpoints alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from ..results import Closer
from .candidates import Candidate, CandidateValues, Clock, Pairs, gather, values_of
from .population import CLEAN, Images, Population, Scale, last_hidden, probing_images

QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)
REPEATS = 5  # timings, of which the median counts


def auc(alike: np.ndarray, unlike: np.ndarray, closer: Closer) -> float:
    """How often a pair that is alike has a closer value than one that is not; ties count half.

    1: the two never overlap; ½: the measure cannot tell them apart.
    """
    if not len(alike) or not len(unlike):
        raise ValueError(f"need values of both kinds, got {len(alike)} alike and {len(unlike)} unlike")
    ranks = stats.rankdata(np.concatenate([alike, unlike]))[: len(alike)]
    share = (ranks.sum() - len(alike) * (len(alike) + 1) / 2) / (len(alike) * len(unlike))
    return float(share if closer == "up" else 1 - share)


class Probes:
    """The networks of calibration, and their activations at the last hidden layer for any images."""

    def __init__(self, scale: Scale, images: Images, population: Population, *, seed: int) -> None:
        self.scale, self.images, self.population, self.seed = scale, images, population, seed
        self._kept: dict[str, tuple[Tensor, list[Tensor], list[list[Tensor]]]] = {}

    @property
    def unlike(self) -> Pairs:
        """Pairs of untrained networks in a ring: each is in two pairs."""
        count = len(self.population.untrained)
        return [(k, (k + 1) % count) for k in range(count)]

    @property
    def alike(self) -> Pairs:
        """Pairs of consecutive checkpoints of a converged run."""
        return [(k, k + 1) for k in range(self.scale.checkpoints - 1)]

    def values(self, candidate: Candidate, kind: str, number: int) -> tuple[CandidateValues, CandidateValues]:
        """Values of pairs alike and unlike, on that many images of a kind."""
        clock = Clock(self.scale.budget)
        untrained: Sequence[Any] = self.population.untrained
        converged: Sequence[Sequence[Any]] = self.population.converged
        inputs = None
        if candidate.of == "activations":
            every, untrained, converged = self.activations(kind)
            inputs, untrained = every[:number], [x[:number] for x in untrained]
            converged = [[x[:number] for x in run] for run in converged]
        unlike = values_of(candidate, untrained, self.unlike, inputs=inputs, clock=clock)
        alike = gather(values_of(candidate, run, self.alike, inputs=inputs, clock=clock) for run in converged)
        return alike, unlike

    def activations(self, kind: str) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
        """The inputs, flattened; the activations of untrained networks, and of each run's checkpoints."""
        if kind not in self._kept:
            x = probing_images(kind, self.images, self.seed)
            untrained = [last_hidden(model, x) for model in self.population.untrained]
            converged = [[last_hidden(model, x) for model in run] for run in self.population.converged]
            self._kept[kind] = x.flatten(1).double(), untrained, converged
        return self._kept[kind]

    def seconds(self, candidate: Candidate, number: int) -> float:
        """The median time for one pair alone, with nothing computed beforehand."""
        things: Sequence[nn.Module] | Sequence[Tensor] = self.population.converged[0][:2]
        inputs = None
        if candidate.of == "activations":
            every, _, converged = self.activations(CLEAN)
            things, inputs = [x[:number] for x in converged[0][:2]], every[:number]
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            values_of(candidate, things, [(0, 1)], inputs=inputs)
            if inputs is not None and inputs.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if sum(times) > self.scale.budget / 10:
                break
        return statistics.median(times)


def calibrate(candidate: Candidate, closer: Closer, probes: Probes) -> dict[str, Any]:
    """How far apart the two distributions are: with all images, with fewer, and with corrupted ones."""
    scale = probes.scale
    most = min(candidate.rows or scale.test, len(probes.images.test))
    numbers = sorted({*(n for n in scale.numbers if n < most), most})
    if candidate.of == "models":
        whole = _summary(*probes.values(candidate, CLEAN, most), closer)
        return {"number": None, "clean": whole, "numbers": [], "kinds": {},
                "seconds": [[None, probes.seconds(candidate, most)]]}  # fmt: skip
    by_number = [[n, _summary(*probes.values(candidate, CLEAN, n), closer)] for n in numbers]
    by_kind = {kind: _summary(*probes.values(candidate, kind, most), closer) for kind in scale.corruptions}
    return {
        "number": most,
        "clean": by_number[-1][1],
        "numbers": by_number,
        "kinds": by_kind,
        "seconds": [[n, probes.seconds(candidate, n)] for n in numbers],
    }


def _summary(alike: CandidateValues, unlike: CandidateValues, closer: Closer) -> dict[str, Any]:
    near, far = (side.values[side.defined] for side in (alike, unlike))
    return {
        "auc": auc(near, far, closer) if len(near) and len(far) else None,
        "alike": _distribution(near),
        "unlike": _distribution(far),
        "undefined": dict((alike.reasons + unlike.reasons).most_common(3)),
    }


def _distribution(values: np.ndarray) -> dict[str, Any] | None:
    if not len(values):
        return None
    return {"n": len(values), "mean": float(values.mean()), "quantiles": np.quantile(values, QUANTILES).tolist()}
