"""One pass over the data: every source reads the same chunk, and each pair's statistics grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..capture import Chunk, input_rows
from ..linalg import lacks_room
from ..process_state import products
from ..progress import Progress
from ..results import Side
from ..stats import GramMaker, Grams, MomentMaker, Moments, RowSampler, Sample, SampleMaker, Statistic, moved, on_device
from .distributed import SingleProcess
from .network import Source
from .plan import Kind, Plan, allows_tf32
from .stream import check_positions

# Naming the site whose activations are not finite, without making a GPU wait at every site


class NotFiniteActivations(ValueError):
    """Some activations are NaN or infinite, or too large to be squared."""


class Inspector:
    """Takes one number a site from each chunk and looks at it as soon as that costs no wait.

    On a CPU that is at once. On a GPU the numbers travel while the next chunk runs and are looked at then.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, list[str], Tensor, torch.cuda.Event | None]] = []
        self.offsets: dict[tuple[str, str], float] = {}

    def take(self, source: str, sites: list[str], numbers: Tensor) -> None:
        """`numbers` (2, sites): a sum that is finite if the activations are, and how far off the mean was."""
        if not numbers.is_cuda:
            self._look(source, sites, numbers)
            return
        self.finish(keep=1)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((source, sites, host, event))

    def finish(self, keep: int = 0) -> None:
        while len(self._waiting) > keep:
            source, sites, numbers, event = self._waiting.pop(0)
            if event is not None:
                event.synchronize()
            self._look(source, sites, numbers)

    def _look(self, source: str, sites: list[str], numbers: Tensor) -> None:
        sums, offsets = numbers.tolist()
        bad = [site for site, total in zip(sites, sums, strict=True) if not math.isfinite(total)]
        if bad:
            shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            raise NotFiniteActivations(
                f"{source}: activations are NaN or infinite (or too large to square) at {shown}. "
                "Check the input's normalisation and the weights; the first site named is where it starts"
            )
        for site, offset in zip(sites, offsets, strict=True):
            key = (source, site)
            self.offsets[key] = max(self.offsets.get(key, 0.0), offset)


Pair = tuple[int, int]
TOLERATED_OFFSET = 1e3  # n‖mean‖² / Σ‖x − mean‖² that float32 products still bear


@dataclass
class Totals:
    """The statistics of one pair of sources so far."""

    statistics: dict[Kind, Statistic] = field(default_factory=dict)
    inputs: int = 0
    rows: int = 0
    _pending: list[Sample] = field(default_factory=list)

    def add(self, kind: Kind, part: Statistic) -> None:
        if isinstance(part, Sample):
            # Merging copies all rows kept so far, so parts wait until they are worth it.
            self._pending.append(part)
            if sum(p.n for p in self._pending) >= (part.most or 0):
                self.settle()
            return
        total = self.statistics.get(kind)
        # A total that was read from a file may be on another device.
        self.statistics[kind] = part if total is None else moved(total, like=part).merge(part)

    def absorb(self, other: Totals, first_row: int) -> None:
        """Add what another process made of other chunks of the same data, which begin at `first_row`."""
        for kind, part in other.statistics.items():
            total = self.statistics.get(kind)
            self.add(kind, part if total is None else moved(part, like=total))
        self.settle()
        self.inputs += other.inputs
        self.rows += other.rows - first_row

    def on_cpu(self) -> Totals:
        """To be sent to another process."""
        self.settle()
        kept = {kind: on_device(statistic, torch.device("cpu")) for kind, statistic in self.statistics.items()}
        return Totals(kept, self.inputs, self.rows)

    def settle(self) -> None:
        """Merge the samples that are waiting."""
        if self._pending:
            total = self.statistics.get("sample")
            before = [moved(total, like=self._pending[0])] if isinstance(total, Sample) else []
            first, *rest = before + self._pending
            self.statistics["sample"] = first.merge(*rest)
            self._pending = []


class Pass:
    """Collects the planned statistics of each pair of sources; `twins[k]` is the first source like source k."""

    def __init__(
        self,
        sources: Sequence[Source],
        twins: Sequence[int],
        sides: Sequence[Side],
        plan: Plan,
        *,
        seed: int,
        precision: str | None,
        draws: int = 0,
        inputs: bool = False,
        per_input: int = 1,
    ) -> None:
        self.sources, self.twins, self.sides, self.plan = sources, twins, sides, plan
        self.seed, self.draws, self.inputs, self.per_input = seed, draws, inputs, per_input
        self.precision, self.tf32 = precision, allows_tf32(precision)
        lottery = RowSampler(plan.sample_rows, seed) if "sample" in plan.statistics else None
        self._makers = [self._make(lottery) for _ in sources]
        self._lottery = lottery
        self._inspector = Inspector()
        self._device: torch.device | None = None
        self._wide: dict[tuple[int, str], bool] = {}  # sites whose products only float64 holds

    def _make(self, lottery: RowSampler | None) -> dict[Kind, Any]:
        makers: dict[Kind, Any] = {}
        for kind in self.plan.statistics:
            if kind == "grams":
                makers[kind] = GramMaker(self.plan.block, self.plan.uncentred, self.tf32)
            elif kind == "moments":
                makers[kind] = MomentMaker(self.plan.products)
            else:
                assert lottery is not None
                makers[kind] = SampleMaker(lottery, self.plan.widest)
        return makers

    def run(
        self,
        chunks: Iterable[Chunk],
        totals: dict[Pair, Totals],
        *,
        expected: int | None,
        each: Callable[[], None],
        shown: bool = True,
    ) -> None:
        """Read every chunk, and call `each` after it; chunks between them may be left out for other processes."""
        names = " and ".join(dict.fromkeys(source.name for source in self.sources))
        done = next(iter(totals.values())).inputs
        with Progress(f"comparing {names}", expected, "inputs", shown=shown) as bar:
            bar.advance(done)
            for chunk in chunks:
                start = self._start(chunk, next(iter(totals.values())))
                given = self._given(chunk, start)
                read = {k: self._read(k, chunk, start) for k in dict.fromkeys(self.twins)}
                check_positions([self.sources[k] for k in read])
                with products():
                    self._join([read[k] for k in self.twins], totals, chunk, start, given)
                bar.advance(chunk.count)
                each()
        self._inspector.finish()
        for total in totals.values():
            total.settle()

    def _start(self, chunk: Chunk, total: Totals) -> int:
        """The row that a chunk begins with, counted over all chunks: others may have read those before it."""
        left_out = chunk.start - total.inputs
        return total.rows + left_out * self.per_input

    def _read(self, k: int, chunk: Chunk, start: int) -> dict[Kind, Any]:
        """What one source makes of a chunk: parts as the activations appear, then all sites together."""
        makers = self._makers[k]

        def sink(site: str, rows: Tensor) -> dict[Kind, Any]:
            self._device = self._device or _meeting_place(rows)
            rows = rows.to(self._device, torch.float64 if self.precision == "float64" else rows.dtype)
            if (k, site) not in self._wide:
                known = self.sources[k].largest.get(site)  # or else a GPU has to be waited for
                self._wide[k, site] = lacks_room(rows, f"{site} of {self.sources[k].name}", known)
            rows = rows.double() if self._wide[k, site] else rows
            with products(tf32=self.tf32 and self.plan.statistics == ["grams"]):
                return {kind: maker.part(site, rows, start) for kind, maker in makers.items()}

        found = self.sources[k].read(chunk, sink)
        check_positions([self.sources[k]])
        with products():
            sides = {kind: maker.side([parts[kind] for parts in found], start) for kind, maker in makers.items()}
            self._inspect(k, sides)
        return sides

    def _inspect(self, k: int, sides: dict[Kind, Any]) -> None:
        name = self.sources[k].name
        numbers = torch.stack([side.check for side in sides.values()]).sum(0)
        self._inspector.take(name, list(self.sides[k].sites), numbers)
        if "grams" in sides:
            for (source, site), offset in self._inspector.offsets.items():
                if source == name:
                    self._makers[k]["grams"].notice(site, offset)

    def _given(self, chunk: Chunk, start: int) -> Tensor | None:
        """The sampled rows of what the networks are given, where a measure needs them."""
        if not self.inputs or self._lottery is None:
            return None
        rows = input_rows(chunk.batch, chunk.count)
        return rows[torch.from_numpy(self._lottery.draw(start, chunk.count) - start).to(rows.device)]

    def _join(
        self, sides: list[dict[Kind, Any]], totals: dict[Pair, Totals], chunk: Chunk, start: int, given: Tensor | None
    ) -> None:
        rows = 0
        first_block = start // self.plan.block  # on resuming, or for a later part of the data, blocks go on counting
        for (i, j), total in totals.items():
            for kind in self.plan.statistics:
                a, b = sides[i][kind], sides[j][kind]
                joined: Statistic
                if kind == "grams":
                    joined = Grams.join(
                        a, b, block=self.plan.block, first_block=first_block, draws=self.draws, seed=self.seed
                    )
                else:
                    joined = Moments.join(a, b) if kind == "moments" else Sample.join(a, b, given)
                total.add(kind, joined)
                rows = joined.seen if isinstance(joined, Sample) else joined.n
            total.inputs += chunk.count
            total.rows += rows

    def learnt(self) -> list[dict[Kind, Any]]:
        """What the makers have learnt from the first chunk: centres, mostly."""
        return [{kind: maker.learnt() for kind, maker in makers.items()} for makers in self._makers]

    def learn(self, found: list[dict[Kind, Any]]) -> None:
        for makers, theirs in zip(self._makers, found, strict=True):
            for kind, maker in makers.items():
                maker.learn(theirs[kind])

    @property
    def offsets(self) -> dict[tuple[str, str], float]:
        """How far off the mean was at each site, at most."""
        return self._inspector.offsets

    def look_at_all(self) -> None:
        """Look at the numbers that are still on their way: statistics are about to be saved or read."""
        self._inspector.finish()

    def strained(self) -> dict[tuple[str, str], float]:
        """Sites whose mean was so far off in some chunk that float32 products may have lost digits."""
        return {key: offset for key, offset in self._inspector.offsets.items() if offset > TOLERATED_OFFSET}


def gather(ranks: SingleProcess, run: Pass, totals: dict[Pair, Totals], first_row: int) -> None:
    """In the first of several processes, the statistics of all of them, added in their order."""
    if not ranks.several:
        return
    _check_rows(run, totals, first_row)

    def absorb(found: tuple[dict[Pair, Totals], dict[tuple[str, str], float]]) -> None:
        theirs, offsets = found
        for pair, total in totals.items():
            total.absorb(theirs[pair], first_row)
        for key, offset in offsets.items():
            run.offsets[key] = max(run.offsets.get(key, 0.0), offset)

    sent = ({pair: total.on_cpu() for pair, total in totals.items()}, run.offsets) if not ranks.first else ({}, {})
    ranks.collect(sent, absorb)


def _check_rows(run: Pass, totals: dict[Pair, Totals], first_row: int) -> None:
    """Which rows are sampled hangs on their index, and that on all inputs before, which others have read."""
    for total in totals.values():
        if "sample" in run.plan.statistics and total.rows - first_row != total.inputs * run.per_input:
            raise ValueError(
                f"{total.inputs} inputs gave {total.rows - first_row} rows instead of {run.per_input} each: "
                "rows='positions' of texts of different lengths cannot be numbered by several processes. Compare in "
                "one (spread=False), or take rows='mean', 'cls' or 'last'"
            )


def _meeting_place(rows: Tensor) -> torch.device:
    """Where pairs are joined: the first model's device, if it can count in float64."""
    return rows.device if rows.device.type in ("cpu", "cuda") else torch.device("cpu")
