from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sosie.checks import parse_call
from sosie.factory import find_file, is_factory, load_factory


def test_calls_and_their_options() -> None:
    assert parse_call("net") == ("net", {})
    assert parse_call("net()") == ("net", {})
    assert parse_call("net(a=-2, b='x@y:z', c=[1, None], d=1e-3)") == (
        "net",
        {"a": -2, "b": "x@y:z", "c": [1, None], "d": 1e-3},
    )


@pytest.mark.parametrize("text", ["f(1)", "f(a=b)", "f(a=1", "f(a=1)(b=2)", "f(a=1)@g(b=2)", "f(a=1) + 1", "f(*[1])"])
def test_anything_but_literals_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write options as"):
        parse_call(text)


def test_what_is_a_factory() -> None:
    assert is_factory("a/b.py:make")
    assert is_factory("a/b.py")
    assert not is_factory("npz:a.npz")


def test_a_folder_of_its_own_and_no_traces(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "__init__.py").write_text("")
        (tmp_path / name / "part" / "inner.py").write_text(f"VALUE = {name!r}\n")
        (tmp_path / name / "layers.py").write_text("from part.inner import VALUE\n")
        (tmp_path / name / "net.py").write_text(
            "from dataclasses import dataclass\n"
            "from layers import VALUE\n"
            "@dataclass\n"
            "class Box:\n"
            "    value: str\n"
            "def make():\n"
            "    from part import inner\n"
            "    return Box(VALUE).value + inner.VALUE\n"
        )
    path, modules = list(sys.path), set(sys.modules)
    factory = load_factory(f"{tmp_path / 'a' / 'net.py'}:make")
    assert load_factory(f"{tmp_path / 'b' / 'net.py'}:make")() == "bb"
    assert factory() == "aa"
    assert sys.path == path
    assert {name for name in set(sys.modules) - modules if not name.startswith("_")} == set()
    assert not list(tmp_path.rglob("__pycache__"))


def test_an_installation_below_the_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kept_library.py").write_text("")
    (tmp_path / "net.py").write_text("import kept_library\ndef make(): return kept_library\n")
    monkeypatch.syspath_prepend(tmp_path / "src")
    made = load_factory(f"{tmp_path / 'net.py'}:make")()
    assert sys.modules.pop("kept_library") is made


@pytest.mark.parametrize(
    ("content", "name", "kind", "message"),
    [
        ("def make(): pass", "mkae", AttributeError, "no function 'mkae' in .*; did you mean 'make'"),
        ("make = 5", "make", TypeError, "make in .* is int, not a function"),
        ("raise KeyError('torn')", "make", KeyError, "torn"),
        ("import sys; sys.exit(3)", "make", RuntimeError, "ends the program when it is imported"),
        ("def make(:", "make", SyntaxError, "invalid syntax"),
        ("import no_such_module_here", "make", ModuleNotFoundError, "no_such_module_here"),
    ],
)
def test_files_that_fail(tmp_path: Path, content: str, name: str, kind: type[Exception], message: str) -> None:
    (tmp_path / "net.py").write_text(content)
    path, modules = list(sys.path), set(sys.modules)
    with pytest.raises(kind, match=message):
        load_factory(f"{tmp_path / 'net.py'}:{name}")()
    assert sys.path == path
    assert not {key for key in set(sys.modules) - modules if "sosie_factory" in key}


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"net\.py"):
        load_factory(f"{tmp_path / 'net.py'}:make")
    (tmp_path / "net.py").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_factory(f"{tmp_path / 'net.py'}:make")
    with pytest.raises(ValueError, match="names no function"):
        load_factory("net.py:")


def test_files_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "w.npz").touch()
    (tmp_path / "secret.npz").touch()
    monkeypatch.setenv("SOSIE_TRY", os.pathsep.join(["", str(tmp_path / "none"), str(inner)]))
    assert find_file("w.npz", "SOSIE_TRY") == inner / "w.npz"
    assert find_file(str(tmp_path / "secret.npz"), "SOSIE_TRY") == tmp_path / "secret.npz"
    with pytest.raises(FileNotFoundError):
        find_file("../secret.npz", "SOSIE_TRY")
    monkeypatch.delenv("SOSIE_TRY")
    with pytest.raises(FileNotFoundError, match="set SOSIE_TRY"):
        find_file("w.npz", "SOSIE_TRY")
