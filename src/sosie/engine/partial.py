"""The statistics of one pair of sources, before they become values: they can be saved, merged and resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..measures import find
from ..process_state import products
from ..results import Caveat, Comparison, DamagedFile, Side, Values, side_from_json
from ..stats import Sample, Statistic, load_statistics, save_statistics
from . import caveats
from .doubt import NO_DOUBT, Doubt
from .evaluate import evaluate
from .plan import Kind


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
    doubt: Doubt = NO_DOUBT
    mixing: tuple[str, ...] = ()  # models that mix the inputs of a batch, in words
    seen: dict[int, int] | None = None  # sums of digests of the inputs, as `InputDigests` has them

    def finish(self, provenance: dict[str, Any]) -> Comparison:
        """The values of every measure."""
        found: dict[str, Values] = {}
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
                doubt=Doubt(**about["doubt"]),
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
