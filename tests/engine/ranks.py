"""Several processes of torch.distributed for tests: each runs one function, and says what came of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 120  # seconds after which a test that hangs is ended


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """What the function returns in each process, or the error that it raised there."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job").write_bytes(pickle.dumps((function, args)))
        code = f"import sys; sys.path[:0] = {sys.path!r}; from ranks import main; main()"
        processes = [
            subprocess.Popen([sys.executable, "-c", code, folder, str(rank), str(count), str(timeout)], cwd=folder)
            for rank in range(count)
        ]
        try:
            for process in processes:
                process.wait(PATIENCE)
        finally:
            for process in processes:
                process.kill()
        return [pickle.loads((Path(folder) / f"answer{rank}").read_bytes()) for rank in range(count)]


def main() -> None:
    folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), count)
    wait = timedelta(seconds=float(sys.argv[4]))
    store.set_timeout(wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=wait)
    function, args = pickle.loads((folder / "job").read_bytes())
    try:
        answer = function(*args)
    except Exception as error:
        answer = error
    (folder / f"answer{rank}").write_bytes(pickle.dumps(answer))
