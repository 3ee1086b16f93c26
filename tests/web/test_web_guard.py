"""Who may ask, and for what: names of this machine, no other pages, no writes, its own files; uploads with limits."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from starlette.testclient import TestClient
from web_examples import a_run, awaited, made, new_zoo

import sosie
from sosie import report
from sosie.web import app as uploads
from sosie.web import create_app
from sosie.web.app import POLICY
from sosie.zoo import Fingerprint, Probe, Zoo


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8017", "LOCALHOST", "[::1]:80", "127.0.0.1:1"])
def test_names_of_this_machine_are_answered(client: Any, host: str) -> None:
    assert client.get("/api/zoo", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "evil.example/127.0.0.1", "", "0", "[::1"],
)
def test_other_names_are_refused(client: Any, host: str) -> None:
    for path in ("/", "/api/zoo", "/app.js"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "--allow" in answer.json()["error"]


def test_two_names_at_once_are_refused(client: Any) -> None:
    """Which of them a proxy went by is not known."""
    assert client.get("/", headers=[("host", "localhost"), ("host", "evil.example")]).status_code == 421


def test_a_name_can_be_allowed(zoo: Zoo) -> None:
    client = TestClient(create_app(zoo, ["Nets.example"]), base_url="http://nets.example")
    assert client.get("/api/zoo").status_code == 200
    assert client.get("/api/zoo", headers={"host": "evil.example"}).status_code == 421


def test_every_answer_has_the_policy(client: Any) -> None:
    for path in ("/", "/app.js", "/api/zoo", "/api/models/99", "/nothing", "/api/models?limit=0"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_the_page_has_no_script_of_its_own(client: Any) -> None:
    text = client.get("/").text
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="app.js">']
    assert not re.search(r"<style|style=|\son\w+=|https?:", text)


@pytest.mark.parametrize("method", ["put", "delete", "patch", "options"])
def test_nothing_can_be_written(client: Any, zoo: Zoo, method: str) -> None:
    before = zoo.store.changes()
    for path in ("/api/models/1", "/api/near", "/"):
        assert client.request(method, path).status_code == 405
    assert client.post("/api/models/1").status_code == 405
    assert zoo.store.changes() == before


@pytest.mark.parametrize(
    "path",
    ["/zoo.sqlite", "/../zoo.sqlite", "/%2e%2e/zoo.sqlite", "/..%2fapp.py", "/static/app.js", "/built-from.txt",
     "//etc/passwd", "/%00", "/app.py", "/runs/first.json", "/frontend/app.ts", "/api", "/api/nothing", "/docs"],
)  # fmt: skip
def test_only_the_explorers_own_files_are_served(client: Any, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_files_are_known_again(client: Any) -> None:
    first = client.get("/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert client.get("/app.js", headers={"if-none-match": first.headers["etag"]}).status_code == 304


def test_what_breaks_here_is_told_without_details(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(create_app(zoo), base_url="http://localhost", raise_server_exceptions=False)
    monkeypatch.setattr("sosie.zoo.store.Store.page", lambda *_, **__: 1 / 0)
    answer = client.get("/api/models")
    assert answer.status_code == 500
    assert "division" not in answer.text
    assert answer.headers["content-security-policy"] == POLICY


def sent(client: Any, found: Fingerprint, tmp_path: Path, **headers: str) -> Any:
    return client.post("/api/near", content=found.save(tmp_path / "sent.safetensors").read_bytes(), headers=headers)


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No temporary file stays behind, in a folder that no other test uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("sosie-upload-*"))


@pytest.mark.usefixtures("nothing_left")
def test_a_fingerprint_finds_its_nearest_and_is_not_kept(client: Any, zoo: Zoo, tmp_path: Path) -> None:
    before = zoo.store.changes()
    found = made(50, near=zoo["m5"].fingerprint, off=0.2, architecture="Sent")
    answer = sent(client, found, tmp_path).json()
    assert answer["rows"][0]["name"] == "m5"
    assert answer["rows"][0]["value"] == pytest.approx(zoo.search(found, k=1).rows()[0]["value"])
    assert answer["sent"]["architecture"] == "Sent"
    assert zoo.store.changes() == before


@pytest.mark.usefixtures("nothing_left")
def test_another_probe_set_is_refused_with_both_hashes(client: Any, zoo: Zoo, tmp_path: Path) -> None:
    other = Probe.of(torch.ones(16, 3) * torch.arange(16)[:, None])
    answer = sent(client, Fingerprint(**{**vars(made(0)), "probe": other.digest}), tmp_path)
    assert answer.status_code == 422
    assert other.digest in answer.json()["error"]
    assert zoo.settings.probe in answer.json()["error"]


def a_million_rows() -> dict[str, Any]:
    return {"vectors.cka": np.ones((1_000_000, 1), np.float32), "exact": np.ones((1, 120), np.float32)}


@pytest.mark.usefixtures("nothing_left")
def test_files_that_are_no_fingerprints_are_refused(client: Any, zoo: Zoo, tmp_path: Path) -> None:
    save_file(a_million_rows(), tmp_path / "many", metadata={"format": "sosie-fingerprint", "version": "2"})
    good = made(0).save(tmp_path / "good").read_bytes()
    pickled = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    for content in (b"", b"{}", pickled, good[:-5], b"\xff" * 1000, good.replace(b"layer1", b"layer2")):
        answer = client.post("/api/near", content=content)
        assert answer.status_code == 422
        assert "/tmp" not in answer.text
        assert "sosie-upload" not in answer.text
    answer = client.post("/api/near", content=(tmp_path / "many").read_bytes())
    assert answer.status_code in (413, 422)


@pytest.mark.usefixtures("nothing_left")
def test_too_many_bytes_are_refused(client: Any, zoo: Zoo) -> None:
    most = uploads.most_bytes(zoo)
    answer = client.post("/api/near", content=b"", headers={"content-length": str(2 * 10**9)})
    assert answer.status_code == 413
    assert f"{most:,}" in answer.json()["error"]
    # Without a length: no more than the limit is taken in.
    answer = client.post("/api/near", content=(b"x" * 65536 for _ in range(most // 65536 + 2)))
    assert answer.status_code == 413
    assert client.post("/api/near", content=b"", headers={"content-length": "-1"}).status_code == 413


def test_they_are_refused_before_they_are_sent(address: str) -> None:
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sender:
        sender.sendall(b"POST /api/near HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2000000000\r\n\r\n")
        assert sender.recv(65536).startswith(b"HTTP/1.1 413")  # though not a byte of the body is there


def test_slow_senders_are_in_nobodys_way(address: str, tmp_path: Path) -> None:
    port = urlsplit(address).port
    head = b"POST /api/near HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    content = made(0).save(tmp_path / "f").read_bytes()
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * uploads.AT_ONCE)]
    try:
        for sender in slow:
            sender.sendall(head % len(content) + content[:10])  # and the rest is long in coming
        with socket.create_connection(("127.0.0.1", port), timeout=20) as quick:
            quick.sendall(head % len(content) + content)
            assert quick.recv(65536).startswith(b"HTTP/1.1 200")
    finally:
        for sender in slow:
            sender.close()


def test_a_zoo_called_zoo_is_not_named_in_the_midst_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_zoo(tmp_path)
    monkeypatch.chdir(tmp_path)
    served = TestClient(create_app(Zoo("zoo")), base_url="http://127.0.0.1:8017")
    assert served.get("/api/run", params={"name": "x"}).json()["error"] == "no run 'x' in the zoo's folder runs/"
    (tmp_path / "zoo" / "vectors" / "cka-32.f32").unlink()
    told = served.get("/api/models/1/near").json()["error"]
    assert told.startswith("the zoo/vectors/cka-32.f32 ")
    assert str(tmp_path) not in told


@pytest.mark.usefixtures("nothing_left")
def test_a_file_that_never_ends_to_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"x"]

    async def slow() -> Any:
        if not parts:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": parts.pop(), "more_body": True}

    monkeypatch.setattr(uploads, "SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        awaited(lambda: uploads.received(uploads.Request({"type": "http", "headers": []}, slow), 1000))


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9", "https://127.0.0.1.evil.example"]
)
def test_other_pages_may_not_send(client: Any, tmp_path: Path, origin: str) -> None:
    assert sent(client, made(0), tmp_path, origin=origin).status_code == 403


def test_its_own_page_may(client: Any, tmp_path: Path) -> None:
    assert sent(client, made(0), tmp_path, origin="http://127.0.0.1:8017").status_code == 200


def test_the_limit_lets_the_largest_fingerprint_through(client: Any, zoo: Zoo, tmp_path: Path) -> None:
    largest = made(2, sites=64)
    size = largest.save(tmp_path / "largest").stat().st_size
    assert size < uploads.most_bytes(zoo)
    assert sent(client, largest, tmp_path).status_code == 200


def test_the_colours_are_those_of_the_reports_page(client: Any, tmp_path: Path) -> None:
    """One file has them: the page has it inside, the explorer is served it."""
    page = Path(report.__file__).with_name("page")
    colours = (page / "colours.css").read_text("utf-8")
    assert client.get("/colours.css").text == colours
    assert client.get("/").text.index('href="colours.css"') < client.get("/").text.index('href="explorer.css"')
    written = sosie.write_report(a_run(), tmp_path / "run.html")
    assert colours in written.read_text("utf-8")
    shared = set(re.findall(r"--[a-z]+(?=:)", colours))
    assert {"--ground", "--ink", "--accent"} <= shared
    own = client.get("/explorer.css").text
    assert not shared & set(re.findall(r"(--[a-z]+):", own))
    assert not [name for name in re.findall(r"var\((--[a-z0-9-]+)\)", own) if f"{name}:" not in own + colours]
