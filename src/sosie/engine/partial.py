"""The statistics of one pair of sources, before they become values: they can be saved, merged and resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..capture import Chunk
from ..files import DamagedFile
from ..measures import find
from ..process_state import products
from ..results import Caveat, Comparison, Estimate, Side, side_from_json
from ..stats import Sample, Statistic, load_statistics, save_statistics
from . import caveats
from .collect import Pair, Totals
from .evaluate import evaluate
from .network import SavedActivations, Source
from .plan import NO_DOUBT, Kind, UncertaintyOptions
from .provenance import STRETCH, InputDigests


@dataclass(frozen=True)
class Partial:
    """What a pass has summed so far for one pair, and how to read it."""

    side_a: Side
    side_b: Side
    kinds: dict[str, Kind]  # measure -> which statistic it reads
    rows_rule: str
    statistics: dict[Kind, Statistic]
    inputs: int
    rows: int
    notes: dict[str, str] = field(default_factory=dict)  # measure -> why it rests on less than it could
    shortage: str | None = None  # fewer inputs than asked for
    made_with: dict[str, str] = field(default_factory=dict)  # digests of models, first batch and settings
    strained: dict[tuple[str, str], float] = field(default_factory=dict)
    doubt: UncertaintyOptions = NO_DOUBT
    mixing: tuple[str, ...] = ()  # models that mix the inputs of a batch, in words
    seen: dict[int, int] | None = None  # sums of digests of the inputs, as `InputDigests` has them

    def finish(self, provenance: dict[str, Any]) -> Comparison:
        """The values of every measure."""
        found: dict[str, Estimate] = {}
        for kind, statistic in self.statistics.items():
            measures = [find(name) for name, read in self.kinds.items() if read == kind]
            with products():
                found |= evaluate(
                    measures,
                    statistic,
                    self.side_a,
                    self.side_b,
                    sample=self._rows_beside(),
                    doubt=self.doubt,
                    independent=self.rows_rule != "positions" or self.rows <= self.inputs,
                )
        values = {
            name: replace(found[name], caveats=(*found[name].caveats, *self._doubts(name))) for name in self.kinds
        }
        return Comparison(self.side_a, self.side_b, values, self.rows_rule, {**provenance, "inputs": self.inputs})

    def _rows_beside(self) -> Sample | None:
        sample = self.statistics.get("sample")
        return sample if isinstance(sample, Sample) and sample.folded is None else None

    def _doubts(self, name: str) -> Iterator[Caveat]:
        """What the pass has to say about the values of one measure."""
        kind = self.kinds[name]
        if self.shortage:
            yield Caveat(self.shortage)
        yield from map(Caveat, self.mixing)
        if name in self.notes and not self.statistics[kind].exact:
            yield Caveat(self.notes[name])
        yield from caveats.of_left_out(self.side_a, self.side_b)
        if kind == "grams":
            yield from caveats.of_offsets(self.side_a, self.side_b, self.strained)

    def differs_from(self, other: Partial, *, in_data: bool) -> str | None:
        """What keeps two from being of one comparison, in words; parts of the data may differ in their data."""
        for what in ("side_a", "side_b", "kinds", "rows_rule", "doubt"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"{what} is {mine} and {theirs}"
        for what in ("models", "settings", *(("data",) if in_data else ())):
            if self.made_with.get(what) != other.made_with.get(what):
                return f"the {what} are not the same"
        return None

    def merge(self, other: Partial) -> Partial:
        difference = self.differs_from(other, in_data=False)
        if difference:
            raise ValueError(f"these statistics are not of the same comparison: {difference}")
        if self.made_with.get("data") and self.made_with["data"] == other.made_with.get("data"):
            raise ValueError("these statistics begin with the same input: one part twice? (parts need their first_row)")
        statistics = {
            kind: statistic.merge(other.statistics[kind])  # type: ignore[arg-type]
            for kind, statistic in self.statistics.items()
        }
        return replace(
            self,
            statistics=statistics,
            inputs=self.inputs + other.inputs,
            rows=self.rows + other.rows,
            shortage=None,
            seen=None,
            strained={**self.strained, **other.strained},
            mixing=tuple(dict.fromkeys(self.mixing + other.mixing)),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        return save_statistics(
            {str(kind): statistic for kind, statistic in self.statistics.items()},
            path,
            side_a=asdict(self.side_a),
            side_b=asdict(self.side_b),
            kinds=self.kinds,
            rows_rule=self.rows_rule,
            inputs=self.inputs,
            rows=self.rows,
            notes=self.notes,
            made_with=self.made_with,
            doubt=asdict(self.doubt),
            mixing=self.mixing,
            seen=None if self.seen is None else {stretch: f"{total:x}" for stretch, total in self.seen.items()},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partial:
        statistics, about = load_statistics(path)
        try:
            side_a, side_b = (side_from_json(about[side]) for side in ("side_a", "side_b"))
            seen = about.get("seen")
            return cls(
                side_a,
                side_b,
                kinds=dict(about["kinds"]),
                rows_rule=about["rows_rule"],
                statistics=statistics,  # type: ignore[arg-type]
                inputs=int(about["inputs"]),
                rows=int(about["rows"]),
                notes=dict(about["notes"]),
                made_with=dict(about["made_with"]),
                doubt=UncertaintyOptions(**about["doubt"]),
                mixing=tuple(about.get("mixing", ())),  # older files have none
                seen=None if seen is None else {int(stretch): int(total, 16) for stretch, total in seen.items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def merge_files(paths: Sequence[str | os.PathLike[str]]) -> Partial:
    """Saved statistics of several parts of the data as one, in the order given."""
    first, *rest = (Partial.load(path) for path in paths)
    for other in rest:
        first = first.merge(other)
    return first


# Saving statistics on the way, and going on from them

EVERY = 60.0  # seconds between two saves


class Checkpoint:
    """The file of a comparison that can be interrupted; without a path it does nothing."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        pairs: Sequence[Pair],
        sources: Sequence[Source],
        *,
        on_the_way: bool = True,
    ) -> None:
        if path is not None and len(pairs) != 1:
            raise ValueError("resume= is for one pair of models; compare the pairs one by one")
        self.path = None if path is None else Path(path)
        self._pair = pairs[0]
        self._saved_sources = [source for source in sources if isinstance(source, SavedActivations)]
        self._on_the_way = on_the_way  # not where one process knows but a part
        self._last = time.monotonic()
        self.digests = InputDigests()  # of the inputs that were read
        self._before: dict[int, int] = {}  # the same, of those that the file holds
        self._skip = 0

    def restore(
        self, totals: dict[Pair, Totals], partials: Callable[[], dict[Pair, Partial]], *, most: int | None
    ) -> int:
        """Fill the totals from the file, if it is there and of this very comparison; how many inputs they hold."""
        if self.path is None or not self.path.exists():
            return 0
        saved, fresh = Partial.load(self.path), partials()[self._pair]
        difference = fresh.differs_from(saved, in_data=True)
        if difference:
            raise self._other(difference)
        if saved.seen is None:
            raise ValueError(f"{self.path} is older and does not say which inputs it holds: remove it to begin anew")
        if most is not None and saved.inputs > most:
            raise ValueError(f"{self.path} holds {saved.inputs} inputs already, more than max_rows={most}")
        totals[self._pair] = Totals(dict(saved.statistics), saved.inputs, saved.rows)
        self._before, self._skip = saved.seen, saved.inputs
        return saved.inputs

    def save(self, partials: Callable[[], dict[Pair, Partial]], *, now: bool = False) -> None:
        if self.path is None or not (now or (self._on_the_way and time.monotonic() - self._last >= EVERY)):
            return
        replace(partials()[self._pair], seen=self.digests.sums).save(self.path)
        self._last = time.monotonic()

    def digested(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks, whose inputs are remembered."""
        for chunk in chunks:
            if self.path is not None:
                self._digest(chunk)
            yield chunk

    def skipped(self, chunk: Chunk) -> None:
        """Inputs that the file holds already, as the data have them now; raise where they are others."""
        self._digest(chunk)
        end = chunk.start + chunk.count
        for k in range(chunk.start // STRETCH, end // STRETCH if end < self._skip else -(-end // STRETCH)):
            if self.digests.sums[k] != self._before.get(k):
                rows = f"{k * STRETCH} to {min((k + 1) * STRETCH, self._skip) - 1}"
                raise self._other(f"the data are not the same: among inputs {rows} there are others")

    def _digest(self, chunk: Chunk) -> None:
        stop = chunk.start + chunk.count
        saved = [source.activations(chunk.start, stop) for source in self._saved_sources]
        self.digests.add((chunk.batch, *saved), chunk.start, chunk.count)

    def _other(self, difference: str) -> ValueError:
        return ValueError(f"{self.path} is of another comparison: {difference}; name another file, or remove it")
