"""A zoo to serve, a client that asks without a network, and a server for a browser."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the explorer needs sosie[web]")
pytest.importorskip("httpx2", reason="starlette's test client needs httpx2")
uvicorn = pytest.importorskip("uvicorn", reason="the explorer needs sosie[web]")

from web_examples import a_run, new_zoo  # noqa: E402

from sosie.web import create_app  # noqa: E402
from sosie.zoo import Zoo  # noqa: E402


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    """Twelve models: the first four related, one with a hostile name; and a run."""
    found = new_zoo(tmp_path)
    (found.folder / "runs").mkdir()
    a_run().save(found.folder / "runs" / "first.json")
    return found


@pytest.fixture
def client(zoo: Zoo) -> Any:
    from starlette.testclient import TestClient

    return TestClient(create_app(zoo), base_url="http://127.0.0.1:8017")


@contextmanager
def served(zoo: Zoo, **options: Any) -> Iterator[str]:
    """The address of a server with this zoo; options are uvicorn's."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(zoo), log_level="warning", ws="none", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with that zoo, which no test changes."""
    zoo = new_zoo(tmp_path_factory.mktemp("served"))
    (zoo.folder / "runs").mkdir()
    a_run().save(zoo.folder / "runs" / "first.json")
    with served(zoo) as found:
        yield found


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """`serve(zoo)` gives the address of a server with another zoo; options are uvicorn's."""
    with ExitStack() as stack:
        yield lambda zoo, **options: stack.enter_context(served(zoo, **options))


@pytest.fixture
def look(chromium: Any, address: str) -> Iterator[Callable[..., Any]]:
    """`look("#/models", width=390)` opens a view; what the browser complained about is in `complaints`."""
    contexts = []

    def opened(view: str, width: int = 1280, at: str = address, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.asked = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (page.complaints.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(at + view)
        page.wait_for_selector("main:not([aria-busy])")
        return page

    yield opened
    for context in contexts:
        context.close()
