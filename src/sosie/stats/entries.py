"""Entry by entry: mergeable sums over two activations of one shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        of_input = torch.zeros(5, len(a), dtype=torch.float64, device=a.device)  # as in `RowSums`
        mismatched, lone, alike = of_input.new_zeros(3).unbind()
        at, lone_at = (torch.zeros(2, dtype=torch.long, device=a.device) for _ in range(2))
        largest, count, step = 0.0, 0, 1 if a.numel() <= ALL else STEP
        sampled: list[Tensor] = []  # |a − b|
        for number, piece in enumerate(pieces(a, b, keep)):
            found = row_sums(piece.a, piece.b)
            of_input.index_add_(1, piece.rows // piece.per_input, found.sums)
            count += piece.a.numel()
            sampled.append(found.size.flatten()[number % step :: step].clone())
            if found.largest > largest:
                row = found.most.argmax()
                largest, at = found.largest, piece.place(row, found.size[row].argmax())
            if found.lone is not None:
                here = found.lone.sum()
                first = piece.place(*torch.unravel_index(found.lone.flatten().int().argmax(), found.lone.shape))
                lone_at = torch.where((lone == 0) & (here > 0), first, lone_at)
                lone, alike, mismatched = lone + here, alike + found.alike, mismatched + here
            if found.largest > atol:
                allowed = piece.b.abs().mul_(rtol).add_(atol)
                mismatched = mismatched + allowed.lt_(found.size).sum(1).double().sum()
        aa, bb, _, ad, _ = of_input
        # Two inputs of zeros are as alike as can be; the root of each factor, since a product of squares may overflow.
        norms = aa.sqrt() * bb.sqrt()
        # Rounding alone takes a cosine out of −1 to 1.
        cosine = torch.where(norms > 0, (aa - ad) / norms, torch.where(aa == bb, 1.0, 0.0)).clamp(-1, 1)
        least = cosine.min() if len(a) else aa.new_ones(())
        aa, bb, dd, ad, d = aa.new_zeros(5, GROUPS).index_add_(1, _groups(start, len(a), aa.device), of_input)
        shift = torch.tensor([start, 0], device=aa.device)
        counts = torch.bincount(_bins(torch.cat(sampled or [aa.new_zeros(0)])), minlength=BINS) * step
        return cls(
            aa, bb, ad, dd, d.sum(), cosine.sum(), least, aa.new_tensor(largest), at + shift, mismatched, counts, lone,
            lone_at + shift, alike, count, len(a),
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


@dataclass(frozen=True)
class Piece:
    """Some entries of two activations, as numbers to calculate with: rows, or the columns of some rows from one on."""

    a: Tensor  # (rows, columns), float32 or float64
    b: Tensor
    rows: Tensor  # their numbers among all rows
    column: int
    width: int  # columns in all
    per_input: int  # rows of an input

    def place(self, row: Tensor, column: Tensor) -> Tensor:
        """(2,): the input that an entry of this piece belongs to, and its index among that input's entries."""
        number = self.rows[row]
        start = (number % self.per_input) * self.width
        return torch.stack([number // self.per_input, start + self.column + column])


def pieces(a: Tensor, b: Tensor, keep: Tensor | None = None) -> Iterator[Piece]:
    """Two activations (inputs, …) of one shape piece by piece: rows are inputs, or with `keep` the tokens kept."""
    a, b = real_numbers(a), real_numbers(b)
    if not a.numel():
        return
    wide = torch.promote_types(_wide(a.dtype), _wide(b.dtype))
    per_input = 1 if keep is None else keep.shape[1]
    a, b = (each.reshape(len(each) * per_input, -1) for each in (a, b))
    index = torch.arange(len(a), device=a.device) if keep is None else keep.reshape(-1).nonzero()[:, 0]
    most, width = PIECE.get(a.device.type, PIECE["cpu"]), a.shape[1]
    step = max(1, most // max(1, width))
    for first in range(0, len(index), step):
        part = slice(first, first + step)
        rows = index[part].to(a.device)
        some = [each[part if keep is None else rows.to(each.device)] for each in (a, b)]
        for column in range(0, width, most):
            x, y = (each[:, column : column + most].to(a.device, wide) for each in some)
            yield Piece(x, y, rows, column, width, per_input)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate with: float32 for numbers of up to 32 bits, float64 for others and for whole numbers."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


@dataclass(frozen=True)
class RowSums:
    """Sums over the entries of each row of a piece, and where entries are odd."""

    sums: Tensor  # (5, rows) in float64: Σ a², Σ b², Σ (a − b)², Σ a (a − b), Σ (a − b)
    size: Tensor  # (rows, columns) |a − b|, 0 where an entry is odd
    most: Tensor  # (rows,) the largest of each row
    largest: float
    lone: Tensor | None = None  # (rows, columns) whether an entry is odd on one side; None: all are finite
    alike: int | Tensor = 0


def row_sums(a: Tensor, b: Tensor) -> RowSums:
    """The sums over the entries of each row: in the type at hand, again in float64 where that is not enough."""
    sums, d = _sums(a, b)
    size = d.abs_()
    most = size.amax(1)
    low, high = SAFE if a.dtype == torch.float32 else (-1.0, math.inf)
    squares = sums[:3]
    # A GPU is waited for once.
    least, greatest, largest = torch.stack([*squares.aminmax(), most.max().double()]).tolist()
    if low < least and greatest < high:
        return RowSums(sums, size, most, largest)
    safe = (squares > low) & (squares < high)
    safe[2] |= most == 0
    unsafe = ~safe.all(0)
    if not bool(unsafe.any()):
        return RowSums(sums, size, most, largest)
    x, y = a[unsafe].double(), b[unsafe].double()
    odd = ~(x.isfinite() & y.isfinite())
    agree = odd & ((x == y) | (x.isnan() & y.isnan()))
    sums[:, unsafe], d = _sums(x.masked_fill(odd, 0), y.masked_fill(odd, 0))
    size[unsafe] = d.abs().to(size.dtype)
    most = size.amax(1)
    lone = torch.zeros_like(size, dtype=torch.bool)
    lone[unsafe] = odd & ~agree
    return RowSums(sums, size, most, float(most.max()), lone, agree.sum())


def _sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The five sums of each row, and a − b."""
    d = a - b
    norms = (torch.linalg.vector_norm(x, dim=1) for x in (a, b, d))  # in half the time of a sum of squares
    sums = torch.stack([*norms, torch.linalg.vecdot(a, d), d.sum(1)]).double()
    sums[:3].square_()
    return sums, d


def squared_error(a: Tensor, b: Tensor, keep: Tensor | None = None) -> Tensor | None:
    """(2,) Σ (a − b)² and Σ a² over all entries, in float64 on the CPU; None if one is NaN or infinite on one side."""
    total = torch.zeros(2, dtype=torch.float64)
    if keep is None:
        a, b = real_numbers(a)[None], real_numbers(b)[None]  # one row, also for a single number
    for piece in pieces(a, b, keep):
        norms = [torch.linalg.vector_norm(x) for x in (piece.a - piece.b, piece.a)]
        sums = torch.stack(norms).cpu().double().square_()
        if not SAFE_ENOUGH < float(sums[1]) < SAFE[1] or not float(sums[0]) < SAFE[1]:
            again = row_sums(piece.a, piece.b)
            if again.lone is not None and bool(again.lone.any()):
                return None
            sums = again.sums[[2, 0]].sum(1).cpu()
        total += sums
    return total


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
