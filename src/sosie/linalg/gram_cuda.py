"""Gram matrices of blocks of rows on a GPU, which reads the rows once.

A library product of a few rows and very many columns leaves most of a GPU idle and adds up hundreds of
thousands of products in one place. Here the columns are shared out over the whole device; each part is
centred on the way and has a sum of its own. That takes no longer than reading the memory, and is more exact.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Literal

import torch
from torch import Tensor

About = Literal["mean", "first", "nothing"]  # what is subtracted from the rows: their mean, the first row, or nothing

TILE = 128  # rows that one program multiplies with as many; from more rows only the first row is subtracted
READS = (torch.float32, torch.bfloat16, torch.float16)  # numbers are widened in the kernel
WIDE = 2**14  # columns from which differences may be rounded to bfloat16, since rounding averages out in the sums


COLUMNS: dict[About, int] = {"mean": 64, "nothing": 64, "first": 32}  # per step; about the first, two tiles at a time
WARPS, STAGES, PROGRAMS = 4, 3, 2  # the last: per processor


def suits(stack: Tensor, about: About = "mean") -> bool:
    fits = about == "first" or stack.shape[1] <= TILE
    return fits and stack.is_cuda and stack.dtype in READS and available(about)


@cache
def available(about: About = "mean") -> bool:
    """Return whether Triton works: it comes with most builds of torch for GPUs, but needs a C compiler."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        rows = TILE + 1 if about == "first" else 16  # two tiles take the most memory of a processor's own
        for width in (16, WIDE):
            gram_blocks(torch.ones(1, rows, width, device="cuda"), about=about, tf32=True)
    except Exception as error:  # plain products work in any case
        why = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
        warnings.warn(f"Triton does not work ({why}): Gram matrices take plain products, more slowly", stacklevel=2)
        return False
    return True


def gram_blocks(stack: Tensor, *, about: About, tf32: bool) -> tuple[Tensor, Tensor]:
    """X Xᵀ of each block of a stack (blocks, b, p), after subtracting the mean, the first row or nothing (`about`).

    Also the squared length of what was subtracted: b‖mean‖², ‖first row‖² or 0. Products are TF32, or as good as
    float32 (three TF32 products each); where TF32 would do, those of very many differences from a first row are
    bfloat16.
    """
    from .gram_kernel import gram  # needs Triton

    blocks, b, width = stack.shape
    if about != "first" and b > TILE:
        raise ValueError(f"blocks of {b} rows about {about!r}: {TILE} rows at most")
    stack = stack if stack.stride(2) == 1 else stack.contiguous()
    processors, has_tf32 = _device(stack.device)
    precision = "ieee" if not has_tf32 else "tf32" if tf32 else "tf32x3"
    if about == "first" and precision == "tf32" and width >= WIDE:
        precision = "bf16"
    tiles = _whole(b, TILE)
    programs = blocks * tiles * (tiles + 1) // 2
    columns = COLUMNS[about]
    splits = max(1, min(PROGRAMS * processors // programs, _whole(width, columns)))
    span = _whole(_whole(width, splits), columns) * columns
    splits = _whole(width, span)
    # One more entry than the matrix needs holds the length, so that one sum over the splits gives both.
    parts = torch.empty(blocks, splits, b * b + 1, dtype=torch.float32, device=stack.device)
    with torch.cuda.device(stack.device):
        gram[(programs, splits)](
            stack, parts, b, width, span, stack.stride(0), stack.stride(1), programs // blocks,
            ROWS=max(16, min(TILE, 1 << (b - 1).bit_length())), COLUMNS=columns, ABOUT=about, ALONE=tiles == 1,
            PRECISION=precision, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    found = parts.sum(1)
    return found[:, :-1].view(blocks, b, b), found[:, -1]


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """The number of processors of a GPU, and whether it has TF32."""
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.major >= 8


def _whole(number: int, part: int) -> int:
    """The number of parts that hold a number."""
    return -(-number // part)
