"""Who means ill: connections that never say anything, questions longer than answers, a folder that goes away."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
from web_examples import made

from sosie.web import serving as prompt
from sosie.web.cache import AnswerCache
from sosie.zoo import Zoo


@pytest.fixture
def port(zoo: Zoo, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Of a server that has little patience."""
    monkeypatch.setattr(prompt, "SECONDS", 0.3)
    return urlsplit(serve(zoo, http=prompt.Prompt)).port


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-"])
def test_a_request_that_does_not_come_is_not_waited_for(port: int, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as caller:
        caller.sendall(begun)
        assert caller.recv(100) == b""  # closed; else this takes too long


def test_one_that_comes_is_answered_on_a_connection_that_is_kept(port: int) -> None:
    request = b"GET /api/models/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as caller:
        for _ in range(2):
            caller.sendall(request)
            answer = HTTPResponse(caller)
            answer.begin()
            assert answer.status == 200
            assert json.loads(answer.read())["id"] == 1
        caller.sendall(request[:20])  # and the next begins, but does not end
        while caller.recv(65536):
            pass


def test_a_file_whose_sender_goes_away_is_no_fault_of_the_server(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as caller:
        caller.sendall(b"POST /api/near HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nbegun")
        time.sleep(0.2)  # until it is being read
    with socket.create_connection(("127.0.0.1", port), timeout=20) as caller:
        caller.sendall(b"GET /api/models/1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while caller.recv(65536):
            pass
    time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_questions_take_room_as_answers_do() -> None:
    kept = AnswerCache(lambda: 0, most_bytes=10_000)
    for k in range(100):
        kept.answer(("models", "x" * 1000, k), lambda: 1)
    assert len(kept._answers) < 10


def test_a_zoo_that_is_gone_is_told(zoo: Zoo, client: Any) -> None:
    assert client.get("/api/zoo").status_code == 200
    shutil.rmtree(zoo.folder)
    for path in ("zoo", "models", "models/1", "models/1/near", "map", "clusters"):
        found = client.get(f"/api/{path}")
        assert found.status_code == 503
        assert "the zoo was moved or deleted" in found.json()["error"]
        assert str(zoo.folder.parent) not in found.text


@pytest.mark.parametrize("notes", [5, {"a": 1}, None, "text", [1, {"b": 2}]])
def test_notes_of_any_form(zoo: Zoo, client: Any, notes: Any) -> None:
    found = made(20)
    number = zoo.add(replace(found, about=found.about | {"notes": notes}), "odd").id  # type: ignore[union-attr]
    answer = client.get(f"/api/models/{number}")
    assert answer.status_code == 200
    assert answer.json()["notes"] == (["1", "{'b': 2}"] if isinstance(notes, list) else [])
