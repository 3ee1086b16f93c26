"""What all tests share: one thread each (two run side by side), seeded rows, and a browser."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session")
def _closed_pages(chromium: Any) -> list[Any]:
    """Pages that no test has now: the next one takes them, since a new one costs half a second."""
    return []


@pytest.fixture
def new_page(chromium: Any, _closed_pages: list[Any]) -> Iterator[Callable[..., Any]]:
    """`new_page(width=390)` has lists of what the browser says (`complaints`) and of what it asks for (`asked`)."""
    opened = []

    def fresh() -> Any:
        page = chromium.new_context().new_page()
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (page.complaints.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        return page

    def page_of(width: int, color_scheme: str = "light") -> Any:
        page = _closed_pages.pop() if _closed_pages else fresh()
        opened.append(page)
        page.complaints, page.asked = [], []
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="screen", color_scheme=color_scheme)
        return page

    yield page_of
    for page in opened:
        page.context.set_offline(False)
        page.goto("about:blank")
        page.mouse.move(0, 0)
        _closed_pages.append(page)


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
