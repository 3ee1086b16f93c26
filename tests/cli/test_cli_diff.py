"""`sosie diff` and `sosie record`: exit statuses as those of diff(1), files, messages."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import sosie
from sosie.cli.diff import DIFFERENT, SAME
from sosie.cli.main import app
from sosie.results import Diff

A, B = "small_cnn(seed=0, width=4)", "small_cnn(seed=1, width=4)"


def status(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return found.exit_code, found.output


def test_the_exit_status_says_whether_they_are_the_same(tmp_path: Path) -> None:
    options = ("--data", "demo", "--max-rows", 32)
    code, text = status("diff", A, A, *options)
    assert (code, text.splitlines()[0]) == (SAME, "The same, bit for bit, at all 13 sites.")
    out, html, junit = (tmp_path / f"d.{suffix}" for suffix in ("json", "html", "xml"))
    code, text = status("diff", f"base={A}", f"ported={B}", *options, "--out", out, "--html", html, "--junit", junit)
    assert code == DIFFERENT
    assert text.startswith("Different from conv1 on")
    found = sosie.load(out)
    assert isinstance(found, Diff)
    assert (found.name_a, found.name_b, found.first) == ("base", "ported", "conv1")
    assert "base and ported" in html.read_text("utf-8")
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("tests") == str(len(found.sites) + 1)
    assert suite.get("errors") == "0"
    assert int(suite.get("failures") or 0) == 1 + sum(site.beyond for site in found.sites)
    code, text = status("diff", A, B, *options, "--json", "--no-replay")
    assert code == DIFFERENT
    assert json.loads(text)[0]["site_a"] == "conv1"


def test_a_tolerance_and_a_map(tmp_path: Path) -> None:
    options = ("--data", "demo", "--max-rows", 16, "--sites", "conv1")
    assert status("diff", A, B, *options, "--floor", "1e6")[0] == SAME
    assert status("diff", A, A, *options, "--map", "conv1=conv1")[0] == SAME
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("conv1 = conv1\n")
    assert status("diff", A, A, *options, "--map", pairs)[0] == SAME


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((A, B), "give data"),
        ((A, B, "--data", "demo", "--map", "conv1"), "--map is a=b"),
        ((A, B, "--data", "demo", "--floor", "soft"), "floor must be one of"),
        ((A, "nothing", "--data", "demo"), "no architecture 'nothing'"),
        ((A, "net.onnx", "--data", "demo"), "an ONNX file is onnx:net.onnx"),
    ],
)
def test_trouble(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    match: str,
) -> None:
    from sosie.cli import main

    junit = tmp_path / "j.xml"
    junit.write_text("of an earlier run")
    monkeypatch.setattr("sys.argv", ["sosie", "diff", *arguments, "--junit", str(junit)])
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 2
    assert match in capsys.readouterr().err
    suite = ElementTree.parse(junit).getroot()
    assert [suite.get(key) for key in ("tests", "failures", "errors")] == ["1", "0", "1"]
    error = suite.find("testcase/error")
    assert match in str(error.get("message"))


def test_a_wrong_ending_is_trouble_not_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sosie.cli import main

    monkeypatch.setattr("sys.argv", ["sosie", "diff", A, A, "--data", "demo", "--out", str(tmp_path / "d.csv")])
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 2


def test_a_record_and_what_is_held_against_it(tmp_path: Path) -> None:
    golden = tmp_path / "golden.safetensors"
    said = status("record", A, "--data", "demo", "--max-rows", 4, "--out", golden)[1]
    assert "12 sites, 4 inputs" in said
    assert status("diff", golden, A)[0] == SAME
    assert status("diff", golden, B)[0] == DIFFERENT
