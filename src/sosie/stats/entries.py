"""Entry by entry: mergeable sums over two activations of one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from ..checks import paired_rows
from .sampling import dealt_groups

GROUPS = 32  # of inputs, whose sums are kept apart for intervals
SLICE = {"cpu": 2**17, "cuda": 2**24}  # entries that are reduced at a time: a CPU's cache holds them
PER_OCTAVE, LEAST, MOST = 8, -160, 128  # bins of log₂|a − b| for each factor of 2, from 2^LEAST to 2^MOST
BINS = PER_OCTAVE * (MOST - LEAST)
RTOL = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
ATOL = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


@dataclass(frozen=True)
class Entries:
    """Sums over the entries of two activations, in float64; measures of differences read them.

    `merge` adds inputs. An entry that is not finite on both sides counts as equal if both sides agree about it, and is
    left out of the sums in any case; `lone` counts those about which they do not agree.
    """

    aa: Tensor  # (groups,) Σ a², by group of inputs
    bb: Tensor
    ab: Tensor
    dd: Tensor  # Σ (a − b)²
    a: Tensor  # Σ a
    b: Tensor
    cosines: Tensor  # Σ over inputs of the cosine of an input's entries in A and B
    least_cosine: Tensor
    largest: Tensor  # the largest |a − b|
    at: Tensor  # (2,) its input and the index among that input's entries
    mismatched: Tensor  # entries beyond atol + rtol |b|, as torch.testing.assert_close counts them
    counts: Tensor  # (BINS + 1,) entries by log₂|a − b|; the first are equal
    lone: Tensor  # entries that are NaN or infinite on one side alone, or infinite in other directions
    lone_at: Tensor  # (2,) the first of them
    alike: Tensor  # entries that are NaN or infinite on both sides
    entries: int
    inputs: int

    @classmethod
    def of(
        cls, a: Tensor, b: Tensor, *, start: int = 0, rtol: float | None = None, atol: float | None = None
    ) -> Entries:
        """The sums for (inputs, entries); `start` is the number of the first input.

        The tolerances are those of `torch.testing.assert_close` for the coarser type unless given.
        """
        paired_rows(len(a), len(b))
        if a.shape != b.shape:
            raise ValueError(f"need activations of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
        dtype = coarser(a.dtype, b.dtype)
        rtol = RTOL.get(dtype, 1.3e-6) if rtol is None else rtol
        atol = ATOL.get(dtype, 1e-5) if atol is None else atol
        a, b = a.reshape(len(a), -1), b.reshape(len(b), -1).to(a.device)
        step = max(1, SLICE.get(a.device.type, SLICE["cpu"]) // max(1, a.shape[1]))
        parts = [_sums(a[k : k + step], b[k : k + step], start + k, rtol, atol) for k in range(0, len(a), step)]
        return reduce(cls.merge, parts)

    def merge(self, other: Entries) -> Entries:
        """The sums over the inputs of both."""
        added = ("aa", "bb", "ab", "dd", "a", "b", "cosines", "mismatched", "counts", "lone", "alike")
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
        value = torch.exp2((first - 0.5) / PER_OCTAVE + LEAST)
        return torch.where(first == 0, torch.zeros_like(value), torch.minimum(value, self.largest))


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The type with the larger rounding."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def _sums(a: Tensor, b: Tensor, start: int, rtol: float, atol: float) -> Entries:
    n, width = a.shape
    a, b = a.double(), b.double()
    lone = alike = a.new_zeros(())
    lone_at = torch.zeros(2, dtype=torch.long, device=a.device)
    d = a - b
    dd = d.square().sum(1)
    if not bool(dd.isfinite().all()):
        odd = ~(a.isfinite() & b.isfinite())
        agree = odd & ((a == b) | (a.isnan() & b.isnan()))
        lone_here = odd & ~agree
        lone, alike = lone_here.sum().double(), agree.sum().double()
        lone_at = _place(lone_here.flatten().int().argmax(), width, start)
        a, b = a.masked_fill(odd, 0), b.masked_fill(odd, 0)
        d = a - b
        dd = d.square().sum(1)
    size = d.abs()
    aa, bb, ab = a.square().sum(1), b.square().sum(1), (a * b).sum(1)
    # Two inputs of zeros are as alike as can be; the root of each factor, since a product of squares may overflow.
    norms = aa.sqrt() * bb.sqrt()
    cosine = torch.where(norms > 0, ab / norms, torch.where(aa == bb, 1.0, 0.0)).clamp(-1, 1)
    bins = torch.where(size > 0, ((size.log2() - LEAST) * PER_OCTAVE).floor().clamp(0, BINS - 1) + 1, 0.0)
    place = size.argmax() if size.numel() else torch.zeros((), dtype=torch.long, device=a.device)
    group = dealt_groups(torch.arange(start, start + n), GROUPS).to(a.device)

    def grouped(values: Tensor) -> Tensor:
        return values.new_zeros(GROUPS).index_add(0, group, values)

    return Entries(
        grouped(aa), grouped(bb), grouped(ab), grouped(dd), a.sum(), b.sum(),
        cosine.sum(), cosine.min() if n else a.new_ones(()),
        size.max() if size.numel() else a.new_zeros(()), _place(place, width, start),
        (size > atol + rtol * b.abs()).sum().double() + lone, torch.bincount(bins.flatten().long(), minlength=BINS + 1),
        lone, lone_at, alike, a.numel(), n,
    )  # fmt: skip


def _place(index: Tensor, width: int, start: int) -> Tensor:
    return torch.stack([index // max(1, width) + start, index % max(1, width)])


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
