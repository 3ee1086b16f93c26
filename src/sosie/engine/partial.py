"""The statistics of one pair of networks so far, in memory and on disk: save, merge, resume and finish them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..capture import Chunk, gives_several_rows
from ..files import DamagedFile, check_schema, reading
from ..measures import find
from ..process_state import products
from ..results import SIDE, Caveat, Comparison, Estimate, Side, rules_of
from ..stats import Collected, Sample, load_statistics, moved, on_device, save_statistics
from . import caveats
from .evaluate import evaluate
from .network import RowSample, SavedActivations, Source, unlike
from .plan import StatisticKind
from .provenance import STRETCH, InputDigests, add_digests, input_digests

EVERY = 60.0  # seconds between two saves
PLAIN = ("kinds", "rows_rule", "inputs", "rows", "notes", "made_with")  # fields that files have as they are

SCHEMA = {
    "side_a": SIDE,
    "side_b": SIDE,
    "kinds": {str: str},
    "rows_rule": str,
    "inputs": int,
    "rows": int,
    "notes": {str: str},
    "made_with": {str: str},
    "doubt": {"draws": int, "seed": int, "interval": bool, "grouped?": bool},
    "mixing?": [str],  # not in older files
    "seen?": (None, {str: str}),
    "first_rows?": [{str: [[float]]}],
    "first_input?": (None, int),
    "made_up?": (None, {"inputs": str, "rows": [{str: [[float]]}], "tolerated": [float]}),
}


@dataclass(frozen=True)
class MadeUpRows:
    """What two networks make of a few made-up inputs: equal for parts of one comparison, whatever their data."""

    inputs: str  # their shapes: only the same inputs can be compared
    rows: Sequence[RowSample]  # of either side
    tolerated: Sequence[float]  # differences between machines

    def differ_from(self, other: MadeUpRows, sides: tuple[Side, Side]) -> str | None:
        """A sentence on where the rows differ."""
        if self.inputs != other.inputs:
            return None
        tolerated = [max(pair) for pair in zip(self.tolerated, other.tolerated, strict=True)]
        return _other_rows("the same made-up inputs", sides, self.rows, other.rows, tolerated)


def _other_rows(
    inputs: str,
    sides: tuple[Side, Side],
    one: Sequence[RowSample],
    other: Sequence[RowSample],
    tolerated: Sequence[float],
) -> str | None:
    for side, a, b, most in zip(sides, one, other, tolerated, strict=False):
        for site in a:
            if unlike(a, b, site, most):
                return (
                    f"{inputs} give other rows at {site} of {side.name}: they are prepared differently "
                    "(prepare, inputs), another row rule is used (rows), or the model computes something else"
                )
    return None


@dataclass(eq=False)
class Partial:
    """The statistics of one pair so far, and how to read them."""

    side_a: Side
    side_b: Side
    kinds: dict[str, StatisticKind]  # measure -> the statistic that it reads
    rows_rule: str
    statistics: dict[StatisticKind, Collected] = field(default_factory=dict)
    inputs: int = 0
    rows: int = 0
    notes: dict[str, str] = field(default_factory=dict)  # measure -> why it rests on less than it could
    made_with: dict[str, str] = field(default_factory=dict)  # digests of models, first batch and settings
    draws: int = 0
    seed: int = 0
    interval: bool = False
    grouped: bool = False  # whether inputs come in groups, whose rows are correlated
    mixing: tuple[str, ...] = ()  # notes on models that mix the inputs of a batch
    seen: InputDigests | None = None
    first_rows: Sequence[RowSample] = ()  # of either side, to detect rows made in another way
    made_up: MadeUpRows | None = None  # what both sides make of inputs that do not depend on the data
    first_input: int | None = None  # its index in the whole data; not in older files
    merged_inputs: tuple[range, ...] = ()  # of other parts
    order_samples: tuple[Sample | None, Sample | None] = (None, None)  # of either side: rows of the whole data
    max_rows: int | None = None  # the data may have fewer
    strained: dict[tuple[str, str], float] = field(default_factory=dict)  # large offsets of means, by model and site
    _waiting: list[Sample] = field(default_factory=list, init=False, repr=False)

    # Sums

    def add(self, kind: StatisticKind, part: Collected) -> None:
        """Add the statistic of a chunk. Samples wait, since merging copies all rows kept so far."""
        if isinstance(part, Sample):
            self._waiting.append(part)
            if sum(sample.n for sample in self._waiting) >= (part.most or 0):
                self.settle()
            return
        total = self.statistics.get(kind)
        # A total that was read from a file may be on another device.
        self.statistics[kind] = part if total is None else moved(total, like=part).merge(part)

    def settle(self) -> None:
        """Merge the samples that are waiting."""
        if self._waiting:
            total = self.statistics.get("sample")
            before = [moved(total, like=self._waiting[0])] if isinstance(total, Sample) else []
            first, *rest = before + self._waiting
            self.statistics["sample"] = first.merge(*rest)
            self._waiting = []

    def on_cpu(self) -> Partial:
        """A copy on the CPU, to be sent to another process."""
        self.settle()
        cpu = torch.device("cpu")
        statistics = {kind: on_device(part, cpu) for kind, part in self.statistics.items()}
        return replace(self, statistics=statistics, order_samples=(None, None))

    def absorb(self, other: Partial, first_row: int) -> None:
        """Add the statistics of another process, from other chunks of the same data, which begin at `first_row`."""
        for kind, part in other.statistics.items():
            total = self.statistics.get(kind)
            self.add(kind, part if total is None else moved(part, like=total))
        self.settle()
        self.inputs += other.inputs
        self.rows += other.rows - first_row

    def merge(self, other: Partial) -> Partial:
        """The statistics over two parts of the data, each as it was saved."""
        if difference := self.differs_from(other, in_data=False):
            raise ValueError(f"these statistics are not of the same comparison: {difference}")
        for mine, theirs in itertools.product(self.input_ranges, other.input_ranges):
            if shared := range(max(mine.start, theirs.start), min(mine.stop, theirs.stop)):
                raise ValueError(
                    f"these statistics overlap: inputs {shared[0]} to {shared[-1]} are there more than once. Say where "
                    "each part of the data begins: sosie.data.DataPart(data, first_row=…)"
                )
        if self.made_with.get("data") and self.made_with["data"] == other.made_with.get("data"):
            raise ValueError("these statistics begin with the same input: is a part there twice? (sosie.data.DataPart)")
        return replace(
            self,
            statistics={
                kind: statistic.merge(other.statistics[kind])  # type: ignore[arg-type]
                for kind, statistic in self.statistics.items()
            },
            order_samples=(
                _both(self.order_samples[0], other.order_samples[0]),
                _both(self.order_samples[1], other.order_samples[1]),
            ),
            inputs=self.inputs + other.inputs,
            first_input=None,
            merged_inputs=self.input_ranges + other.input_ranges,
            rows=self.rows + other.rows,
            seen=None,
            strained={**self.strained, **other.strained},
            mixing=tuple(dict.fromkeys(self.mixing + other.mixing)),
        )

    def differs_from(self, other: Partial, *, in_data: bool) -> str | None:
        """The first difference to another comparison, in words; without `in_data`, their data may differ."""
        for what in ("side_a", "side_b", "kinds", "rows_rule", "draws", "seed", "interval", "grouped"):
            a, b = getattr(self, what), getattr(other, what)
            if a != b:
                return f"{what} is {a} and {b}"
        for what in ("models", "settings", *(("data",) if in_data else ())):
            if self.made_with.get(what) != other.made_with.get(what):
                return f"the {what} are not the same"
        if not in_data and self.made_up is not None and other.made_up is not None:
            return self.made_up.differ_from(other.made_up, (self.side_a, self.side_b))
        return None

    @property
    def input_ranges(self) -> tuple[range, ...]:
        """Which inputs of the whole data these statistics are of, as far as that is known."""
        own = () if self.first_input is None else (range(self.first_input, self.first_input + self.inputs),)
        return own + self.merged_inputs

    def rows_differ_from(self, other: Partial, tolerated: Sequence[float]) -> str | None:
        """A sentence on where the same first inputs gave other rows; older files do not hold any."""
        sides = (self.side_a, self.side_b)
        return _other_rows("the first inputs", sides, self.first_rows, other.first_rows, tolerated)

    # Values

    def finish(self, provenance: dict[str, Any]) -> Comparison:
        """The values of every measure."""
        self.settle()
        if not self.rows:
            raise ValueError(
                "the data gave no rows: the attention_mask marks every token as padding (it has 1 at tokens)"
            )
        sample = self.statistics.get("sample")
        rows = sample if isinstance(sample, Sample) and sample.folded is None else None
        estimates: dict[str, Estimate] = {}
        for kind, statistic in self.statistics.items():
            with products(one_core=kind != "grams"):
                estimates |= evaluate(
                    [find(name) for name, read in self.kinds.items() if read == kind],
                    statistic,
                    self.side_a,
                    self.side_b,
                    sample=rows,
                    draws=self.draws,
                    seed=self.seed,
                    interval=self.interval,
                    order_samples=self.order_samples,
                    correlated=self._correlated,
                )
        values = {
            name: replace(estimates[name], caveats=(*estimates[name].caveats, *self._caveats(name)))
            for name in self.kinds
        }
        return Comparison(self.side_a, self.side_b, values, self.rows_rule, {**provenance, "inputs": self.inputs})

    @property
    def _correlated(self) -> Caveat | None:
        """Why the rows are no independent draws, if they are not."""
        if any(map(gives_several_rows, rules_of(self.rows_rule))) and self.rows > self.inputs:
            return caveats.OF_POSITIONS
        return caveats.OF_GROUPS if self.grouped else None

    def _caveats(self, name: str) -> Iterator[Caveat]:
        """The caveats of the pass on the values of one measure."""
        kind = self.kinds[name]
        if self.max_rows is not None and self.inputs < self.max_rows:
            yield Caveat(f"max_rows={self.max_rows}, but the data had {self.inputs} inputs")
        yield from map(Caveat, self.mixing)
        if name in self.notes and not self.statistics[kind].exact:
            yield Caveat(self.notes[name])
        yield from caveats.of_left_out(self.side_a, self.side_b)
        if kind == "grams":
            yield from caveats.of_offsets(self.side_a, self.side_b, self.strained)

    # Files

    def save(self, path: str | os.PathLike[str]) -> Path:
        self.settle()
        return save_statistics(
            {str(kind): statistic for kind, statistic in self.statistics.items()}
            | {f"order_{side}": each for side, each in zip("ab", self.order_samples, strict=True) if each is not None},
            path,
            side_a=asdict(self.side_a),
            side_b=asdict(self.side_b),
            doubt={name: getattr(self, name) for name in ("draws", "seed", "interval", "grouped")},
            mixing=self.mixing,
            first_rows=self.first_rows,
            made_up=None if self.made_up is None else asdict(self.made_up),
            first_input=self.first_input,
            seen=None if self.seen is None else {stretch: f"{total:x}" for stretch, total in self.seen.items()},
            **{name: getattr(self, name) for name in PLAIN},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partial:
        statistics, about = load_statistics(path)
        check_schema(path, about, SCHEMA)
        samples = statistics.pop("order_a", None), statistics.pop("order_b", None)  # not in older files
        with reading(path):
            seen = about.get("seen")
            return cls(
                side_a=Side.from_json(about["side_a"]),
                side_b=Side.from_json(about["side_b"]),
                statistics=statistics,  # type: ignore[arg-type]
                order_samples=samples,
                mixing=tuple(about.get("mixing", ())),
                first_rows=about.get("first_rows", ()),
                made_up=MadeUpRows(**about["made_up"]) if about.get("made_up") else None,
                first_input=about.get("first_input"),
                seen=None if seen is None else {int(stretch): int(total, 16) for stretch, total in seen.items()},
                **{name: about[name] for name in PLAIN},
                **about["doubt"],
            )


def _both(one: Sample | None, other: Sample | None) -> Sample | None:
    """One sample over both parts of the data, if both have theirs."""
    return None if one is None or other is None else one.merge(other)


def finish_files(paths: Sequence[str | os.PathLike[str]], provenance: dict[str, Any], **options: Any) -> Comparison:
    """The values of saved statistics of several parts of the data, merged in the order of the paths."""
    if any(value not in (None, False) for value in options.values()):
        raise ValueError(
            "measures, null, interval and groups were set when these statistics were collected: leave them out"
        )
    first, *rest = (Partial.load(path) for path in paths)
    try:
        for other in rest:
            first = first.merge(other)
        return first.finish(provenance)
    except (RuntimeError, IndexError) as error:
        raise DamagedFile(f"these statistics do not fit together: {error}") from error


class ResumeFile:
    """The file of a comparison that can be resumed; without a path it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None, partial: Partial, sources: Sequence[Source]) -> None:
        self.path = None if path is None else Path(path)
        self.partial = partial
        self.digests: InputDigests = {}  # of the inputs that were read
        self._saved_sources = [source for source in sources if isinstance(source, SavedActivations)]
        self._tolerated = [source.tolerated() for source in sources]  # differences between rows
        self._before: InputDigests = {}  # digests of the inputs that the file holds
        self._held = 0  # their number
        self._other_rows: str | None = None  # how its rows differ; raised once its inputs are known to be the same
        self._last = time.monotonic()

    def restore(self) -> int:
        """Take the statistics from the file, if it exists and is of this comparison; return the number of inputs."""
        if self.path is None or not self.path.exists():
            return 0
        saved, fresh = Partial.load(self.path), self.partial
        if difference := fresh.differs_from(saved, in_data=True):
            raise self._other(difference)
        if saved.seen is None:
            raise ValueError(f"{self.path} is of an older sosie and does not name its inputs: remove it to start again")
        if fresh.max_rows is not None and saved.inputs > fresh.max_rows:
            raise ValueError(f"{self.path} holds {saved.inputs} inputs already, more than max_rows={fresh.max_rows}")
        fresh.statistics, fresh.inputs, fresh.rows = dict(saved.statistics), saved.inputs, saved.rows
        fresh.order_samples = saved.order_samples
        self._before, self._held = saved.seen, saved.inputs
        self._other_rows = fresh.rows_differ_from(saved, self._tolerated)
        return saved.inputs

    def due(self) -> bool:
        return self.path is not None and time.monotonic() - self._last >= EVERY

    def save(self) -> None:
        if self.path is not None:
            self.partial.settle()
            replace(self.partial, seen=self.digests).save(self.path)
            self._last = time.monotonic()

    def digest(self, chunk: Chunk) -> None:
        """Add the digests of a chunk's inputs."""
        if self.path is not None:
            stop = chunk.start + chunk.count
            saved = [source.activations(chunk.start, stop) for source in self._saved_sources]
            add_digests(self.digests, input_digests((chunk.batch, *saved), chunk.start, chunk.count))

    def check_skipped(self, chunk: Chunk) -> None:
        """Raise unless these inputs, which the file holds already, are the same as then."""
        self.digest(chunk)
        end, held = chunk.start + chunk.count, self._held
        for k in range(chunk.start // STRETCH, end // STRETCH if end < held else -(-end // STRETCH)):
            if self.digests[k] != self._before.get(k):
                rows = f"{k * STRETCH} to {min((k + 1) * STRETCH, held) - 1}"
                raise self._other(f"the data are not the same: inputs {rows} differ")
        if end >= held and self._other_rows is not None:
            raise self._other(self._other_rows)

    def _other(self, difference: str) -> ValueError:
        return ValueError(f"{self.path} is of another comparison: {difference}; name another file, or remove it")
