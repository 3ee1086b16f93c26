"""The kernel behind `gram_cuda`: a part of a Gram matrix, of two tiles of rows and some of their columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plus_product(total, left, right, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        found = tl.dot(left.to(tl.bfloat16), tl.trans(right.to(tl.bfloat16)), total)
    else:
        found = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    return found


@triton.jit
def first_row(origin, column, known):
    """The first row, as a sum over one row, so that Triton does not load it in the order of a product's operand.

    In that order several threads wait for one bank of the shared memory, and the kernel takes a sixth longer.
    """
    return tl.sum(tl.load(origin + column[None, :], mask=known[None, :], other=0.0).to(tl.float32), axis=0)


@triton.jit
def with_itself(
    rows, origin, first, last, b, inside,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ABOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of a tile less its mean, first row or nothing, with itself; and the length of what was subtracted."""
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    length = tl.zeros((COLUMNS,), dtype=tl.float32)
    for k in range(first, last, COLUMNS):
        column = k + tl.arange(0, COLUMNS)
        known = column < last
        wanted = inside & known[None, :] if ABOUT == "mean" else known[None, :]
        tile = tl.load(rows + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        if ABOUT == "mean":
            off = tl.sum(tile, axis=0) / b
            length += off * off
            tile = tl.where(inside, tile - off[None, :], 0.0)
        elif ABOUT == "first":
            off = first_row(origin, column, known)
            length += off * off
            tile -= off[None, :]
        total = plus_product(total, tile, tile, PRECISION)
    return total, tl.sum(length, axis=0)


@triton.jit
def with_another(
    left_rows, right_rows, origin, first, last, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The product of two tiles, after subtracting the first row of their block from both."""
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for k in range(first, last, COLUMNS):
        column = k + tl.arange(0, COLUMNS)
        known = column < last
        left = tl.load(left_rows + column[None, :], mask=known[None, :], other=0.0).to(tl.float32)
        right = tl.load(right_rows + column[None, :], mask=known[None, :], other=0.0).to(tl.float32)
        off = first_row(origin, column, known)[None, :]
        total = plus_product(total, left - off, right - off, PRECISION)
    return total


@triton.jit
def gram(
    stack, parts, b, width, span, stride_block, stride_row, pairs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ABOUT: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, pair, split = tl.program_id(0) // pairs, tl.program_id(0) % pairs, tl.program_id(1)
    origin = stack + block.to(tl.int64) * stride_block
    place = parts + (block * tl.num_programs(1) + split).to(tl.int64) * (b * b + 1)
    first = split * span
    last = tl.minimum(first + span, width)
    # Pairs of tiles i ≤ j in the order (0, 0), (0, 1), (1, 1), (0, 2) …; 1e-3 outweighs a root rounded down.
    j = 0 if ALONE else ((tl.sqrt(8.0 * pair + 1.0) - 1.0) / 2.0 + 1e-3).to(tl.int32)
    i = 0 if ALONE else pair - j * (j + 1) // 2
    row, column = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last are the last again: what is made of them is not stored.
    rows = origin + tl.minimum(row, b - 1)[:, None].to(tl.int64) * stride_row
    if i == j:
        total, length = with_itself(rows, origin, first, last, b, (row < b)[:, None], ROWS, COLUMNS, ABOUT, PRECISION)
    else:
        columns = origin + tl.minimum(column, b - 1)[:, None].to(tl.int64) * stride_row
        total = with_another(rows, columns, origin, first, last, ROWS, COLUMNS, PRECISION)
        length = 0.0
    inside = (row < b)[:, None] & (column < b)[None, :]
    if not ALONE:  # what lies above the diagonal is stored below it as well
        inside &= row[:, None] <= column[None, :]
        tl.store(place + column[None, :] * b + row[:, None], total, mask=inside)
    tl.store(place + row[:, None] * b + column[None, :], total, mask=inside)
    tl.store(place + b * b, length * b if ABOUT == "mean" else length, mask=pair == 0)
