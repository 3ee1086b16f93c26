"""What all tests share: one thread each (two run side by side), seeded rows, and a browser."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from paired import correlated_rows

from sosie import process_state

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
FLAGS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One for all tests of a process: playwright runs once in a thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=binary, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def _threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that earlier tests left behind (of browsers, servers, schedulers) do not keep the random state from being
    put back: they draw nothing.
    """
    left, draws_nothing = set(threading.enumerate()), process_state._draws_nothing
    monkeypatch.setattr(process_state, "_draws_nothing", lambda thread: thread in left or draws_nothing(thread))


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return correlated_rows()
