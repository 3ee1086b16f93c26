"""The inputs that all models of a collection are shown: fixed, few, known by a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...capture import Batches, NoData, recut, without_labels
from ...data import open_data
from ...engine.digest import digest_of

PROBES = 256
FEWEST_PROBES = 4  # U-centring needs as many
MOST_PROBES = 2048  # from there on the exact vectors of a model's sites take half a gigabyte


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs in one batch, and the hash by which two fingerprints can tell that they saw the same."""

    batch: Any
    n: int
    digest: str  # of the inputs, their order and their type; not of labels, nor of how they came in batches

    @classmethod
    def of(cls, data: Any, most: int = PROBES) -> Probe:
        """The first inputs of the data, `most` of them at most; data are what `sosie.compare` takes."""
        if isinstance(data, Probe):
            return data
        if isinstance(most, bool) or not isinstance(most, int) or not FEWEST_PROBES <= most <= MOST_PROBES:
            raise ValueError(f"{most!r} probes: a number from {FEWEST_PROBES} to {MOST_PROBES}")
        batches = Batches(open_data(data) if isinstance(data, str) else data)
        chunk = next(recut(batches, block=most, max_rows=most), None)
        if chunk is None:
            raise NoData("the data yielded no inputs")
        if chunk.count < FEWEST_PROBES:
            raise ValueError(f"a probe set needs at least {FEWEST_PROBES} inputs, got {chunk.count}")
        return cls(chunk.batch, chunk.count, digest_of(without_labels(chunk.batch)))

    def __repr__(self) -> str:
        return f"<Probe {self.digest}: {self.n} inputs>"
