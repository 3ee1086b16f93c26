"""Shares of a stream: all chunks are there, each in one share, whether inputs are read in order or by index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sosie.capture import Batches, Chunk, Share, recut
from sosie.data import ImageData

N = 101
X = torch.arange(N * 3.0).reshape(N, 3)


def images() -> Any:
    return ImageData(torch.arange(N, dtype=torch.uint8).reshape(N, 1, 1, 1)).batches(16)


def same(a: Any, b: Any) -> bool:
    return (
        all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, (list, tuple)) else torch.equal(a, b)
    )


@pytest.mark.parametrize(
    ("block", "skip", "max_rows", "largest"),
    [
        (None, 0, None, None),
        (None, 5, 60, 9),
        (None, 99, 500, None),
        (4, 0, 60, None),
        (4, 96, None, 9),
        (4, 200, 101, None),
        (8, 0, 101, 9),
        (8, 5, None, None),
        (8, 99, 60, 9),
        (50, 0, 500, 9),
        (50, 96, 60, None),
        (200, 5, 101, None),
        (200, 99, None, 9),
    ],
)
@pytest.mark.parametrize("kind", ["loader", "images", "iterable"])
def test_shares_make_up_the_whole(
    kind: str, block: int | None, skip: int, max_rows: int | None, largest: int | None
) -> None:
    def data() -> Any:
        if kind == "images":
            return images()
        loader = DataLoader(TensorDataset(X, X), 16)
        return loader if kind == "loader" else list(loader)

    how: dict[str, Any] = {"block": block, "skip": skip, "max_rows": max_rows, "largest": largest}
    assert (Batches(data()).read is None) == (kind == "iterable")
    whole: list[Chunk] = list(recut(data(), **how))
    shares = [list(recut(data(), **how, share=Share(rank, 3))) for rank in range(3)]
    for number, chunk in enumerate(whole):
        for rank, share in enumerate(shares):
            assert (share[number].start, share[number].count) == (chunk.start, chunk.count)
            assert (share[number].batch is not None) == (number % 3 == rank)
        assert same(shares[number % 3][number].batch, chunk.batch)
    assert {len(share) for share in shares} == {len(whole)}


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X), 16, shuffle=True),
        DataLoader(TensorDataset(X), 16, collate_fn=lambda rows: torch.stack([row[0] for row in rows])),
        DataLoader(TensorDataset(X), batch_sampler=[[0, 1], [5]]),
    ],
    ids=["shuffled", "put together by a function", "chosen"],
)
def test_only_plain_loaders_are_read_by_index(loader: Any) -> None:
    assert Batches(loader).read is None
