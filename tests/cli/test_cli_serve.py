"""`sosie serve` as a process of its own: it says where it is, answers, and ends when it is told to."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from sosie.cli.main import app

pytest.importorskip("fastapi", reason="the explorer needs sosie[web]")
pytest.importorskip("uvicorn", reason="the explorer needs sosie[web]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sosie.zoo import Zoo

    made = tmp_path_factory.mktemp("served") / "nets"
    Zoo(made, "demo", max_rows=16, kinds="cka").add("small_cnn(seed=0)", name="a")
    return made


def test_it_answers_on_this_machine_and_ends(folder: Path) -> None:
    command = [sys.executable, "-m", "sosie", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"1 models? at (http://127\.0\.0\.1:\d+/)", line)
            assert found, line
            with urlopen(f"{found[1]}api/zoo", timeout=30) as answer:
                assert json.load(answer)["models"] == 1
            with urlopen(found[1], timeout=30) as answer:
                assert b"<title>sosie</title>" in answer.read()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "ended" in rest
    assert "Traceback" not in errors


def test_a_taken_port_is_told(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = CliRunner().invoke(app, ["serve", str(folder), "--port", str(taken.getsockname()[1])])
    assert isinstance(found.exception, OSError)
    assert "--port 0" in str(found.exception)


def test_no_zoo_is_told_before_anything_is_served(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert isinstance(found.exception, FileNotFoundError)
    assert "no zoo" in str(found.exception)


def test_without_the_extra_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sosie.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    found = CliRunner().invoke(app, ["serve", str(folder), "--port", "0"])
    assert isinstance(found.exception, ImportError)
    assert "sosie[web]" in str(found.exception)
