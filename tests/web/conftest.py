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
def look(new_page: Callable[..., Any], address: str) -> Callable[..., Any]:
    """`look("#/models", width=390)` opens a view."""

    def opened(view: str, width: int = 1280, at: str = address, **options: Any) -> Any:
        page = new_page(width, **options)
        page.goto(at + view)
        page.wait_for_selector("main:not([aria-busy])")
        return page

    return opened
