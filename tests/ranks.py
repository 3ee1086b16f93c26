"""Several processes of torch.distributed for tests: each runs one function, and says what came of it."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked import CONTEXT

PATIENCE = 120  # seconds after which a test that hangs is ended


def run_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns in each process, or the error that it raised there."""
    with tempfile.TemporaryDirectory() as folder:
        given = [(Path(folder), rank, count, function, args) for rank in range(count)]
        processes = [CONTEXT.Process(target=_of_rank, args=each) for each in given]  # type: ignore[attr-defined]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(PATIENCE)
        finally:
            for process in processes:
                process.kill()
        return [pickle.loads((Path(folder) / f"answer{rank}").read_bytes()) for rank in range(count)]


def _of_rank(folder: Path, rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.chdir(folder)
    wait = timedelta(seconds=PATIENCE / 2)
    store = dist.FileStore(str(folder / "store"), count)
    store.set_timeout(wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=wait)
    try:
        answer = function(*args)
    except Exception as error:
        answer = error
    (folder / f"answer{rank}").write_bytes(pickle.dumps(answer))
