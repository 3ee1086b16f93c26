"""Gram matrices of blocks of rows on a GPU, in one reading of the rows.

A library product of a few rows and very many columns leaves most of a GPU idle and adds up hundreds of
thousands of products in one place. Here the columns are shared out over the whole device, each part is
centred on the way and summed apart: as fast as the memory can be read, centring included, and more exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

COLUMNS = 64  # columns a step
READS = (torch.float32, torch.bfloat16, torch.float16)  # numbers are widened on the way
PROGRAMS_PER_PROCESSOR = 2


@cache
def available() -> bool:
    """Whether Triton is there and works: it comes with most builds of torch for GPUs, but needs a C compiler."""
    try:
        gram_blocks(torch.ones(1, 16, 16, device="cuda"), centre=True, tf32=True)
    except Exception:  # whatever is amiss, plain products do as well, only slower
        return False
    return True


def suits(stack: Tensor) -> bool:
    return stack.is_cuda and stack.dtype in READS and stack.shape[1] <= 128 and available()


def gram_blocks(stack: Tensor, *, centre: bool, tf32: bool) -> tuple[Tensor, Tensor]:
    """X Xᵀ of each block of a stack (blocks, b, p), about the block's mean or as it is, and b‖mean‖² of each.

    Products are TF32, or as good as float32 (three TF32 products each).
    """
    blocks, b, width = stack.shape
    stack = stack if stack.stride(2) == 1 else stack.contiguous()
    processors, has_tf32 = _device(stack.device)
    splits = max(1, min(PROGRAMS_PER_PROCESSOR * processors // blocks, _whole(width, COLUMNS)))
    span = _whole(_whole(width, splits), COLUMNS) * COLUMNS
    splits = _whole(width, span)
    # One entry more than the matrix needs holds the length: one sum over the splits gives both.
    parts = torch.empty(blocks, splits, b * b + 1, device=stack.device)
    with torch.cuda.device(stack.device):
        _kernel()[(blocks, splits)](
            stack, parts, b, width, span, stack.stride(0), stack.stride(1),
            ROWS=max(16, 1 << (b - 1).bit_length()), COLUMNS=COLUMNS, CENTRE=centre,
            PRECISION="ieee" if not has_tf32 else "tf32" if tf32 else "tf32x3", num_warps=4, num_stages=3,
        )  # fmt: skip
    found = parts.sum(1)
    return found[:, :-1].view(blocks, b, b), found[:, -1]


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Processors of a GPU, and whether it has TF32."""
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.major >= 8


def _whole(number: int, part: int) -> int:
    """How many parts it takes to hold a number."""
    return (number + part - 1) // part


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def gram(
        rows, parts, b, width, span, stride_block, stride_row,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        block, split = tl.program_id(0), tl.program_id(1)
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        start = rows + block.to(tl.int64) * stride_block + row[:, None].to(tl.int64) * stride_row
        inside = (row < b)[:, None]
        total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
        length = tl.zeros((COLUMNS,), dtype=tl.float32)
        first = split * span
        last = tl.minimum(first + span, width)
        for k in range(first, last, COLUMNS):
            known = inside & (k + column < last)[None, :]
            tile = tl.load(start + k + column[None, :], mask=known, other=0.0).to(tl.float32)
            if CENTRE:
                mean = tl.sum(tile, axis=0) / b
                length += b * mean * mean
                tile = tl.where(known, tile - mean[None, :], 0.0)
            total = tl.dot(tile, tl.trans(tile), total, input_precision=PRECISION)
        place = (block * tl.num_programs(1) + split).to(tl.int64) * (b * b + 1)
        tl.store(parts + place + row[:, None] * b + row[None, :], total, mask=inside & (row < b)[None, :])
        tl.store(parts + place + b * b, tl.sum(length, axis=0))

    return gram
