"""Tasks in processes of their own: training small networks is launch-bound, and measures take one core each."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from settings import Settings

from sosie.benchmark import Scale

START = time.monotonic()
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_pools: dict[int, ProcessPoolExecutor] = {}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def each(settings: Settings, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], what: str) -> list[Any]:
    """function(settings, *task) for every task, in their order; the first ones are begun first."""
    found: list[Any] = [None] * len(tasks)
    say(f"{what}: {len(tasks)} tasks")
    if not settings.workers:
        return [function(settings, *task) for task in tasks]
    pool, start = _pool(settings.workers), time.monotonic()
    waiting = {pool.submit(_timed, function, settings, task): k for k, task in enumerate(tasks)}
    for done, future in enumerate(as_completed(waiting), 1):
        found[waiting[future]], seconds = future.result()
        if seconds > 5 or done == len(tasks):
            say(f"{what}: {done} of {len(tasks)} ({_named(tasks[waiting[future]])}: {seconds:.1f} s)")
    say(f"{what}: done in {time.monotonic() - start:.1f} s")
    return found


def _named(task: tuple[Any, ...]) -> str:
    scales = [f"{s.architectures} {s.strategies}" for s in task if isinstance(s, Scale) and len(s.architectures) == 1]
    return ", ".join([str(part) for part in task if isinstance(part, (str, int))] + scales)


def _timed(function: Callable[..., Any], settings: Settings, task: tuple[Any, ...]) -> tuple[Any, float]:
    start = time.monotonic()
    return function(settings, *task), time.monotonic() - start


def _pool(workers: int) -> ProcessPoolExecutor:
    if workers not in _pools:
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))  # what processes inherit: one core each
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        )
        for _ in range(workers):
            pool.submit(int)  # begun while the variables are set
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _pools[workers] = pool
    return _pools[workers]
