"""Timing several ways of doing one thing, in one run, side by side."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def timed(
    ways: dict[str, Callable[[], Any]], *, repeats: int = 5, warm: bool = True, rest: float = 0.0
) -> dict[str, float]:
    """Median seconds of each way; the ways take turns, so that a slow minute of the machine hits all of them.

    `rest`: seconds before each, in which the threads of another library, which spin for a while, come to rest.
    """
    if warm:
        for way in ways.values():
            way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            wait()
            time.sleep(rest)
            start = time.perf_counter()
            way()
            wait()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def high_water() -> int:
    """KiB of memory that this process had at most; ru_maxrss of a child starts at what its parent had."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def machine() -> dict[str, Any]:
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return {
        "on": on,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")
    print(f"wrote {path}")


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()))
    Console(width=120).print(table)
