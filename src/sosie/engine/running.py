"""A measure of rows, or of outputs, that come batch by batch, as in a training loop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..capture import number_array
from ..files import decode, encode
from ..linalg import lacks_room, largest_number, with_room
from ..measures import Measure, find
from ..process_state import products, torch_on_one_core
from ..results import Comparison, Side
from ..stats import (
    BLOCK,
    Grams,
    Moments,
    OutputSums,
    PairedRows,
    Reader,
    SplitMoments,
    on_device,
    tensors_of,
)
from .distributed import together
from .network import OUTPUT
from .one_shot import as_outputs, warn_of_rows
from .outputs import comparison_of
from .partial import Partial
from .plan import MEMORY, Request, find_measures, make_plan, size_text
from .provenance import provenance


class Running:
    """A measure of two sites, or of outputs, that come batch by batch: `update(x, y)`, `compute()`, `reset()`.

    Sums grow, not rows, so memory does not depend on the number of batches. `compute()` is the value that `compare`
    gives for all rows together: batches of any size, even of one row, change nothing, since blocks of 64 rows are cut
    anew. Options of the measure follow its name: `Running("svcca", keep=0.9)`. Measures that read the rows themselves,
    such as mutual_knn, cannot be streamed: that is an error. Measures of outputs take `update(x, y, labels)`, labels if
    they need them, and are as in `compare_outputs`; the first batch decides the `kind` of outputs, unless it is given.

    With torch.distributed initialised, each process updates with rows of its own, and `compute()`, which every process
    must call, merges all of them in the order of the processes; `with sosie.engine.single_process():` stays with one.
    Of layers as wide as `compare` cuts into blocks, each process cuts its own. For `predictivity` each process, as each
    side of `a + b`, deals its own rows into folds, which changes the value as another `seed` does.
    """

    def __init__(self, measure: str | Measure, *, kind: str = "auto", **options: Any) -> None:
        chosen = find(measure).using(**options) if options else find(measure)
        (self.measure,) = find_measures(chosen, of="outputs" if chosen.reads_outputs else "layers")
        self._kinds = (kind, kind)
        if issubclass(self.measure.reads, PairedRows):
            raise ValueError(
                f"{self.measure.name} reads the rows themselves, so it cannot be streamed: collect the rows and pass "
                "them to sosie.measure or sosie.compare, which samples them"
            )
        self._device: torch.device | None = None  # that of the first rows, unless `to` was called
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.n = 0  # rows so far
        self._sides: tuple[Side, ...] = ()  # known once there are rows
        self._sums: Grams | Moments | SplitMoments | OutputSums | None = None
        self._waiting: tuple[Tensor, ...] = ()  # the last rows of x and y, fewer than two blocks

    @torch_on_one_core()
    def update(self, x: Any, y: Any, labels: Any = None) -> None:
        """Add rows x (n, p) and y (n, q), NumPy or torch; row i of both belongs to the same input.

        For measures of outputs, x and y are as in `sosie.measure`, with the right classes as `labels`.
        """
        if self.measure.reads_outputs:
            self._add_outputs(as_outputs(x, "x"), as_outputs(y, "y"), labels)
            return
        if labels is not None:
            raise TypeError(f"{self.measure.name} compares rows, not outputs: it takes no labels")
        rows = _rows(x, "x"), _rows(y, "y")
        if len(rows[0]) != len(rows[1]):
            raise ValueError(f"need paired rows, got {len(rows[0])} and {len(rows[1])}")
        if not len(rows[0]):
            return
        sides = tuple(map(_side, ("x", "y"), rows))
        if not self._sides:
            self._begin(sides)
        if (known := _widths(self._sides)) != _widths(sides):
            raise ValueError(f"the rows before had widths {known}, these have {_widths(sides)}: reset() starts anew")
        self._device = self._device or rows[0].device
        self._add(tuple(each.to(self._device) for each in rows))
        self.n += len(rows[0])

    def merge(self, other: Running) -> Running:
        """Both together, the rows of `other` after these; neither is changed. `a + b` is the same."""
        if self.measure != other.measure:
            raise ValueError(f"{self.measure.name} and {other.measure.name} cannot be merged")
        merged = Running(self.measure, kind=self._kinds[0])
        merged._device = self._device or other._device
        if self._sides and other._sides and (a := _widths(self._sides)) != (b := _widths(other._sides)):
            raise ValueError(f"these rows have widths {a} and {b}")
        if sides := self._sides or other._sides:
            merged._begin(sides)
        for part in (self, other):
            merged._grow(part._sums if merged._device is None else on_device(part._sums, merged._device))
        for part in (self, other):
            if part._waiting:
                merged._add(tuple(rows.to(merged._device) for rows in part._waiting))
        merged.n = self.n + other.n
        return merged

    __add__ = merge

    def to(self, device: str | torch.device) -> Running:
        """Keep the sums, and take all rows, on this device."""
        self._device = torch.device(device)
        self._sums, self._waiting = on_device((self._sums, self._waiting), self._device)
        return self

    def compute(self) -> float:
        """The value for all rows so far, of all processes; an error with the reason where it is undefined.

        Warns, as `sosie.measure` does, of too few rows for the widths, and of directions that the sums do not carry.
        """
        estimate = self._compare({}, warn=True)[self.measure.name]
        value = float(estimate.value[0, 0])
        if value != value:
            texts = (caveat.text.removeprefix("undefined: ") for caveat in estimate.caveats if caveat.undefined)
            reasons = [*texts] or ["one side does not vary"]
            raise ValueError(f"{self.measure.name} is undefined: {'; '.join(reasons)}")
        return value

    def comparison(self) -> Comparison:
        """The value with interval, chance and caveats, where the sums supply them, as `compare` returns it."""
        return self._compare(provenance(settings={"block": BLOCK}))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and text that `torch.save` and `torch.load` keep; of this process alone."""
        tensors: dict[str, Tensor] = {}
        layout = encode({"sums": self._sums, "waiting": self._waiting}, "", tensors)
        about = {"measure": self.measure.name, "n": self.n, "sides": [asdict(side) for side in self._sides]}
        return {**tensors, "about": json.dumps({**about, "layout": layout})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another `Running` of the same measure."""
        about = json.loads(state["about"])
        if about["measure"] != self.measure.name:
            raise ValueError(f"this state is of {about['measure']}, not of {self.measure.name}")
        self.reset()
        if sides := tuple(map(Side.from_json, about["sides"])):
            self._begin(sides)
            self.n, held = about["n"], decode(about["layout"], state)
            self._sums, self._waiting = held["sums"], held["waiting"]
            self.to(self._device or next(tensors_of((self._sums, self._waiting))).device)

    def __repr__(self) -> str:
        return f"<Running {self.measure.name}: {self.n} rows>"

    def _begin(self, sides: tuple[Side, ...]) -> None:
        """Choose the statistic for rows of these widths, as `compare` does for data of unknown length."""
        if self.measure.reads_outputs:
            self._sides = sides
            return
        p, q = (side.widths for side in sides)
        plan = make_plan(Request((self.measure,)), (p, q), None, budget=MEMORY)
        self._kind = plan.kinds[self.measure.name]
        if self._kind == "sample":
            raise ValueError(
                f"{self.measure.name} of {p[0]} and {q[0]} neurons would take covariances of more than "
                f"{size_text(MEMORY)}, so it cannot be streamed: pool the rows, or take a measure of Gram matrices, "
                "such as debiased_cka"
            )
        self._sides, self._makers = sides, [plan.maker(self._kind) for _ in sides]

    def _add(self, rows: tuple[Tensor, ...]) -> None:
        """Add whole blocks to the sums; at least one block waits, since a remainder joins the last one."""
        if self._waiting:
            rows = tuple(torch.cat(pair) for pair in zip(self._waiting, rows, strict=True))
        whole = max(0, len(rows[0]) // BLOCK - 1) * BLOCK
        if whole:
            self._grow(self._sums_of(tuple(each[:whole] for each in rows)))
        self._waiting = tuple(each[whole:].clone() for each in rows)  # a caller may change its rows in place

    def _add_outputs(self, x: Tensor, y: Tensor, labels: Any) -> None:
        self._device = self._device or x.device
        kinds = self._sums.kinds if isinstance(self._sums, OutputSums) else self._kinds
        with products(), torch.no_grad():
            a, b = (
                Reader(name, kind).read(outputs.to(self._device))
                for name, kind, outputs in zip("xy", kinds, (x, y), strict=True)
            )
            right = None if labels is None else as_outputs(labels, "labels")
            sums = OutputSums.join(a, b, right, start=self.n, only=self.measure.reads)
        if self.measure.reads not in sums.supplies:
            raise ValueError(f"{self.measure.name}: {sums.why_not(self.measure.reads)}")
        if sums.n:
            if not self._sides:
                self._begin((_side(OUTPUT, x, "x"), _side(OUTPUT, y, "y")))
            self._grow(sums)
            self.n += sums.n

    def _sums_of(self, rows: tuple[Tensor, ...]) -> Grams | Moments | SplitMoments:
        start = 0 if self._sums is None else self._sums.n  # which decides on folds
        with products(tf32=self._kind == "grams"):
            a, b = (
                maker.side([maker.part(side.name, with_room(each, side.name), start)])
                for maker, side, each in zip(self._makers, self._sides, rows, strict=True)
            )
            if self._kind == "moments":
                return Moments.join(a, b)
            if self._kind == "splits":
                return SplitMoments.join(a, b)
            return Grams.join(a, b, block=BLOCK, first_block=start // BLOCK)

    def _grow(self, sums: Grams | Moments | SplitMoments | OutputSums | None) -> None:
        if sums is not None:
            self._sums = sums if self._sums is None else self._sums.merge(sums)  # type: ignore[arg-type]

    def _compare(self, about: dict[str, Any], *, warn: bool = False) -> Comparison:
        with together() as ranks:
            ranks.agree(lambda: {"the measure": self.measure.name}, "Make the same Running in every process")
            merged = self

            def absorb(state: dict[str, Any]) -> None:
                nonlocal merged
                other = Running(self.measure)
                other.load_state_dict(state)
                merged = merged.merge(other)

            if ranks.several:
                ranks.collect(on_device(self.state_dict(), torch.device("cpu")), absorb)
            return ranks.once(lambda: merged._finish(about, warn))

    @torch_on_one_core()
    def _finish(self, about: dict[str, Any], warn: bool) -> Comparison:
        if not self.n:
            raise ValueError(f"{self.measure.name} has no rows yet: call update(x, y) first")
        a, b = self._sides
        if isinstance(self._sums, OutputSums):
            return comparison_of({(OUTPUT, OUTPUT): self._sums}, (a, b), (self.measure,), [], about)
        sums = self._sums_of(self._waiting)
        whole = sums if self._sums is None else self._sums.merge(sums)  # type: ignore[arg-type]
        partial = Partial(a, b, {self.measure.name: self._kind}, "flatten", {self._kind: whole}, self.n, self.n)
        comparison = partial.finish(about)
        if warn and not math.isnan(comparison[self.measure.name].value[0, 0]):
            statistic = whole.total if isinstance(whole, SplitMoments) else whole
            warn_of_rows(self.measure, statistic, a, b, stacklevel=8)  # at the caller of `compute`
        return comparison


def _rows(values: Any, label: str) -> Tensor:
    rows = values.detach() if isinstance(values, Tensor) else torch.from_numpy(number_array(values, label).copy())
    if rows.ndim != 2 or not rows.shape[1]:
        raise ValueError(f"{label} must be (n, p), got shape {tuple(rows.shape)}: flatten it to (rows, features)")
    if rows.is_complex():
        raise TypeError(f"{label} is complex ({rows.dtype}); compare real and imaginary parts as columns")
    rows = rows if rows.is_floating_point() else rows.double()
    if not math.isfinite(largest := largest_number(rows)):
        raise ValueError(f"{label} has values that are NaN or infinite")
    lacks_room(rows, label, largest)  # raises before the rows count
    return rows


def _side(site: str, rows: Tensor, name: str | None = None) -> Side:
    shape = tuple(rows.shape[1:])
    return Side(name or site, (site,), (math.prod(shape),), (shape,), (str(rows.dtype).removeprefix("torch."),))


def _widths(sides: tuple[Side, ...]) -> tuple[int, ...]:
    return tuple(side.widths[0] for side in sides)
