"""Entry by entry: mergeable sums over two activations of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..checks import paired_rows
from .sampling import dealt_groups

GROUPS = 32  # of inputs, whose sums are kept apart for intervals
PIECE = {"cpu": 2**17, "cuda": 2**24}  # entries that are reduced at a time: a CPU's cache holds them
PER_OCTAVE = 8  # bins of |a − b| for each factor of 2
BINS = PER_OCTAVE * 256  # for each exponent that float32 has, the first three digits of the rest
ALL = 2**18  # entries of an activation up to which the histogram counts each; of a larger one it counts a sample,
STEP = 29  # every 29th, a number of which few widths are a multiple, from another first one on in each piece
SAFE = (1e-30, 1e37)  # sums of squares that float32 gives in full: none of the squares is too small or too large
SAFE_ENOUGH = 1e-16  # Σ a² from which on what float32 loses of (a − b)² is no part of the relative error
RTOL = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
ATOL = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


@dataclass(frozen=True)
class Entries:
    """Sums over the entries of two activations, in float64; measures of differences read them.

    `merge` adds inputs. An entry that is not finite on both sides counts as equal if both sides agree about it, and is
    left out of the sums in any case; `lone` counts those about which they do not agree. Sums of b are kept as those of
    d = a − b, since little is left of their digits when b is near a.
    """

    aa: Tensor  # (groups,) Σ a², by group of inputs
    bb: Tensor
    ad: Tensor  # Σ a (a − b)
    dd: Tensor  # Σ (a − b)²
    d: Tensor  # Σ (a − b)
    cosines: Tensor  # Σ over inputs of the cosine of an input's entries in A and B
    least_cosine: Tensor
    largest: Tensor  # the largest |a − b|
    at: Tensor  # (2,) its input and the index among that input's entries
    mismatched: Tensor  # entries beyond atol + rtol |b|, as torch.testing.assert_close counts them
    counts: Tensor  # (BINS,) entries by the size of |a − b|, of a large activation from a sample; the first are equal
    lone: Tensor  # entries that are NaN or infinite on one side alone, or infinite in other directions
    lone_at: Tensor  # (2,) the first of them
    alike: Tensor  # entries that are NaN or infinite on both sides
    entries: int
    inputs: int

    @classmethod
    def of(
        cls,
        a: Tensor,
        b: Tensor,
        *,
        keep: Tensor | None = None,
        start: int = 0,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Entries:
        """The sums for two activations (inputs, …); `start` is the number of the first input.

        `keep`: (inputs, tokens) for activations (inputs, tokens, …), 0 at padding, which is left out. Activations stay
        as they are, in their own type: float32 or float64 copies are made of `PIECE` entries at a time. The tolerances
        are those of `torch.testing.assert_close` for the coarser type unless given.
        """
        paired_rows(len(a), len(b))
        if a.shape != b.shape:
            raise ValueError(f"need activations of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
        dtype = coarser(a.dtype, b.dtype)
        rtol = RTOL.get(dtype, 1.3e-6) if rtol is None else rtol
        atol = ATOL.get(dtype, 1e-5) if atol is None else atol
        pieces = Pieces.of(a, b, keep)
        step = 1 if a.numel() <= ALL else STEP
        parts, sampled = [], []  # as `_part` gives them; |a − b|
        for number in range(len(pieces.cuts)):
            part, size = _part(*pieces[number], rtol, atol)
            parts.append(part)
            sampled.append(_every(step, number, size))
        table = pieces.table(parts)
        unsafe, rows = pieces.unsafe(table)
        odd = table.new_zeros(2, table.shape[1])  # entries that are NaN or infinite: on one side alone, on both
        for number, span in enumerate(pieces.spans()):
            if unsafe is not None and bool((here := unsafe[span]).any()):
                table[:, span][:, here], odd[:, span][:, here], size = _careful(*pieces[number], here, rtol, atol)
                sampled[number] = _every(step, number, size)
        most, lone = table[5], odd[0]
        mismatched = table[6].sum() + lone.sum()
        at = pieces.place(most, _distance if unsafe is None else _distance_of_finite)
        lone_at = torch.zeros_like(at) if unsafe is None else pieces.place((lone > 0).int(), _is_lone)
        of_input = table.new_zeros(5, len(a)).index_add_(1, pieces.rows // pieces.per_input, table[:5])
        aa, bb, _, ad, _ = of_input
        # Two inputs of zeros are as alike as can be; the root of each factor, since a product of squares may overflow.
        norms = aa.sqrt() * bb.sqrt()
        # Rounding alone takes a cosine out of −1 to 1.
        cosine = torch.where(norms > 0, (aa - ad) / norms, torch.where(aa == bb, 1.0, 0.0)).clamp(-1, 1)
        least = cosine.min() if len(a) else aa.new_ones(())
        aa, bb, dd, ad, d = aa.new_zeros(5, GROUPS).index_add_(1, _groups(start, len(a), aa.device), of_input)
        shift = torch.tensor([start, 0], device=aa.device)
        bins = _bins(torch.cat(sampled or [aa.new_zeros(0)]))
        if pieces.kept is not None:  # padding is counted in one more bin
            bins = torch.where(pieces.kept.index_select(0, _sampled(*pieces.layout, step)), bins, BINS)
        counts = torch.bincount(bins, minlength=BINS + 1)[:BINS] * step
        largest = most.max() if len(most) else aa.new_zeros(())
        return cls(
            aa, bb, ad, dd, d.sum(), cosine.sum(), least, largest, at + shift, mismatched, counts, lone.sum(),
            lone_at + shift, odd[1].sum(), rows * pieces.a.shape[1], len(a),
        )  # fmt: skip

    def merge(self, other: Entries) -> Entries:
        """The sums over the inputs of both."""
        added = ("aa", "bb", "ad", "dd", "d", "cosines", "mismatched", "counts", "lone", "alike")
        here, there = self, other
        larger = there.largest > here.largest
        first = (here.lone == 0) & (there.lone > 0)
        return replace(
            here,
            **{name: getattr(here, name) + getattr(there, name) for name in added},
            least_cosine=torch.minimum(here.least_cosine, there.least_cosine),
            largest=torch.where(larger, there.largest, here.largest),
            at=torch.where(larger, there.at, here.at),
            lone_at=torch.where(first, there.lone_at, here.lone_at),
            entries=here.entries + there.entries,
            inputs=here.inputs + there.inputs,
        )

    def quantile(self, share: float) -> Tensor:
        """The |a − b| that this share of the entries does not exceed, to 9 %."""
        below = self.counts.cumsum(0) >= share * self.counts.sum()
        first = below.int().argmax()
        exponent, digits = first // PER_OCTAVE - 127, first % PER_OCTAVE
        value = torch.ldexp(1 + (digits + 0.5) / PER_OCTAVE, exponent).double()
        return torch.where(first == 0, torch.zeros_like(value), torch.minimum(value, self.largest))


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The type with the larger rounding."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def real_numbers(tensor: Tensor) -> Tensor:
    """The tensor without gradients, dense and real, in its own type."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


Layout = tuple[int, int, int, torch.device]  # rows, their width, the entries of a piece, and where the numbers are


@dataclass(frozen=True)
class Pieces:
    """Two activations as rows, which are inputs or tokens, and the pieces in which they are reduced.

    A piece is some rows, or the columns of one row from one on, which a CPU's cache holds. What each piece gives is
    collected, so that few operations are for pieces, and a GPU is waited for once. Padding is reduced like other rows
    and dropped afterwards, which takes less time than to cut it out.
    """

    a: Tensor  # (rows, width), in its own type
    b: Tensor
    wide: torch.dtype  # to calculate with
    layout: Layout
    rows: Tensor  # (parts,) the number of each row of each piece
    kept: Tensor | None  # (parts,) whether it is no padding
    per_input: int  # rows of an input

    @classmethod
    def of(cls, a: Tensor, b: Tensor, keep: Tensor | None) -> Pieces:
        """`keep` as in `Entries.of`."""
        a, b = real_numbers(a), real_numbers(b)
        wide = torch.promote_types(_wide(a.dtype), _wide(b.dtype))
        per_input = 1 if keep is None else keep.shape[1]
        count = len(a) * per_input
        a, b = (each.reshape(count, each.numel() // max(1, count)) for each in (a, b))
        layout = count, a.shape[1], PIECE.get(a.device.type, PIECE["cpu"]), a.device
        rows = _rows(*layout)
        kept = None if keep is None else (keep.to(a.device) != 0).reshape(-1)[rows]
        return cls(a, b, wide, layout, rows, kept, per_input)

    @property
    def cuts(self) -> Sequence[tuple[slice, slice]]:
        return _cuts(*self.layout[:3])

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        rows, columns = self.cuts[number]
        a, b = (side[rows, columns].to(self.a.device, self.wide) for side in (self.a, self.b))
        return a, b

    def spans(self) -> Iterator[slice]:
        """Where the parts of each piece are."""
        start = 0
        for rows, _ in self.cuts:
            yield slice(start, start := start + rows.stop - rows.start)

    def table(self, parts: Sequence[Tensor], squares: int = 3) -> Tensor:
        """(…, parts) in float64, 0 for padding: what all pieces give; the first numbers are norms, and are squared."""
        table = torch.cat([*parts], 1).double() if parts else self.rows.new_zeros(7, 0, dtype=torch.float64)
        table[:squares].square_()
        return table if self.kept is None else torch.where(self.kept, table, 0.0)

    def unsafe(self, table: Tensor) -> tuple[Tensor | None, int]:
        """(parts,) where the type at hand does not suffice, None if it does everywhere; and how many rows are kept."""
        low, high = SAFE if self.wide == torch.float32 else (-1.0, math.inf)
        squares, rows = table[:3], len(self.a)
        if not squares.numel():
            return None, rows
        safe = (squares > low) & (squares < high)
        safe[2] |= table[5] == 0
        if self.kept is not None:
            safe |= ~self.kept
            kept = self.kept.sum() * rows // len(self.rows)
            everywhere, rows = torch.stack([safe.all().long(), kept]).tolist()  # a GPU is waited for once
        else:
            everywhere = bool(safe.all())
        return None if everywhere else ~safe.all(0), rows

    def place(self, of: Tensor, numbers: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(2,): the input of the largest of these (parts,), and which of its entries has the largest number."""
        if not len(of):
            return self.rows.new_zeros(2)
        row = self.rows[of.argmax()[None]]
        a, b = (side.index_select(0, row.to(side.device)).to(self.a.device, self.wide) for side in (self.a, self.b))
        column = numbers(a, b).argmax()
        return torch.stack([row[0] // self.per_input, row[0] % self.per_input * a.shape[1] + column])


@lru_cache(maxsize=32)  # the chunks share them
def _cuts(rows: int, width: int, most: int) -> Sequence[tuple[slice, slice]]:
    step = max(1, most // max(1, width))
    return [
        (slice(first, min(first + step, rows)), slice(column, min(column + most, width)))
        for first in range(0, rows, step)
        for column in range(0, width, most)
    ]


@lru_cache(maxsize=32)
def _rows(rows: int, width: int, most: int, device: torch.device) -> Tensor:
    """(parts,) The number of each row of each piece."""
    numbers = [torch.arange(some.start, some.stop) for some, _ in _cuts(rows, width, most)]
    return torch.cat(numbers or [torch.arange(0)]).to(device)


@lru_cache(maxsize=8)
def _sampled(rows: int, width: int, most: int, device: torch.device, step: int) -> Tensor:
    """The part that each entry of the histogram is of."""
    found, start = [torch.arange(0)], 0
    for number, (some, columns) in enumerate(_cuts(rows, width, most)):
        count, wide = some.stop - some.start, columns.stop - columns.start
        found.append(start + torch.arange(number % step, count * wide, step) // wide)
        start += count
    return torch.cat(found).to(device)


def _every(step: int, number: int, size: Tensor) -> Tensor:
    """What the histogram counts of a piece."""
    return size.flatten() if step == 1 else size.flatten()[number % step :: step].clone()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate with: float32 for numbers of up to 32 bits, float64 for others and for whole numbers."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


def _part(a: Tensor, b: Tensor, rtol: float, atol: float) -> tuple[Tensor, Tensor]:
    """(7, rows) ‖a‖, ‖b‖, ‖a − b‖, Σ a (a − b), Σ (a − b), the largest |a − b|, and how many are beyond the tolerances;
    and |a − b|.
    """
    d = a - b
    norms = [torch.linalg.vector_norm(x, dim=1) for x in (a, b, d)]  # in half the time of a sum of squares
    products, total = torch.linalg.vecdot(a, d), d.sum(1)
    size = d.abs_()
    most = size.amax(1)
    if a.device.type == "cpu" and float(most.max()) <= atol:
        beyond = torch.zeros_like(most)
    else:  # a GPU does this in the time of waiting for it
        beyond = b.abs().mul_(rtol).add_(atol).lt_(size).sum(1)
    return torch.stack([*norms, products, total, most, beyond]), size


def _careful(a: Tensor, b: Tensor, unsafe: Tensor, rtol: float, atol: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64 for the unsafe rows, with squares for norms; their odd entries, which are left out; and
    |a − b| of all rows.
    """
    size = (a - b).abs_()
    a, b = a[unsafe].double(), b[unsafe].double()
    odd, agree = _odd(a, b)
    table, distances = _part(a.masked_fill(odd, 0), b.masked_fill(odd, 0), rtol, atol)
    table[:3].square_()
    size[unsafe] = distances.to(size.dtype)
    return table, torch.stack([(odd & ~agree).sum(1), agree.sum(1)]).double(), size


def _odd(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are NaN or infinite, and about which of them both sides agree."""
    odd = ~(a.isfinite() & b.isfinite())
    return odd, odd & ((a == b) | (a.isnan() & b.isnan()))


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs_()


def _distance_of_finite(a: Tensor, b: Tensor) -> Tensor:
    return _distance(a.double(), b.double()).masked_fill_(_odd(a, b)[0], 0)


def _is_lone(a: Tensor, b: Tensor) -> Tensor:
    odd, agree = _odd(a, b)
    return (odd & ~agree).int()


def squared_error(a: Tensor, b: Tensor, keep: Tensor | None = None) -> Tensor | None:
    """(2,) Σ (a − b)² and Σ a² over all entries, in float64 on the CPU; None if one is NaN or infinite on one side."""
    if keep is None:
        a, b = real_numbers(a)[None], real_numbers(b)[None]  # one row, also for a single number
    pieces = Pieces.of(a, b, keep)
    norms = []
    for number in range(len(pieces.cuts)):
        x, y = pieces[number]
        norms.append(torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (x - y, x)]))
    if not norms:
        return torch.zeros(2, dtype=torch.float64)
    sums = pieces.table(norms, 2).sum(1).cpu()
    if SAFE_ENOUGH < float(sums[1]) < SAFE[1] and float(sums[0]) < SAFE[1]:
        return sums
    again = Entries.of(a, b, keep=keep)
    return None if bool(again.lone) else torch.stack([again.dd.sum(), again.aa.sum()]).cpu()


@lru_cache(maxsize=8)  # the sites of a chunk share them
def _groups(start: int, inputs: int, device: torch.device) -> Tensor:
    return dealt_groups(torch.arange(start, start + inputs), GROUPS).to(device)


def _bins(size: Tensor) -> Tensor:
    """The bin of each |a − b|: the exponent and the first digits of a float32, which stand side by side in its bits."""
    size = size if size.dtype == torch.float32 else size.clamp(max=torch.finfo(torch.float32).max).float()
    return size.view(torch.int32) >> 20


def jackknife(entries: Entries) -> tuple[float, float] | None:
    """The 95 % interval of the relative error, by leaving out groups of inputs; None with fewer than 8."""
    filled = entries.aa + entries.bb > 0
    groups = int(filled.sum())
    if groups < 8 or not float(entries.aa.sum()):
        return None
    squares = [(each.sum() - each)[filled] for each in (entries.dd, entries.aa)]  # with one group left out
    values = (squares[0] / squares[1]).sqrt()
    whole = float((entries.dd.sum() / entries.aa.sum()).sqrt())
    spread = float((values - values.mean()).square().sum() * (groups - 1) / groups) ** 0.5
    if not math.isfinite(spread):
        return None
    return max(0.0, whole - 1.96 * spread), whole + 1.96 * spread
