"""What is served was compiled from the TypeScript that is there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

import sosie

WEB = Path(sosie.__file__).parent / "web"
FRONT, STATIC = WEB / "frontend", WEB / "static"
SOURCES = [*sorted(FRONT.glob("*.ts")), FRONT / "tsconfig.json"]


def test_the_front_end_was_compiled_after_its_last_change() -> None:
    lines = [line.split(maxsplit=1) for line in (STATIC / "built-from.txt").read_text().splitlines()]
    noted = {name.lstrip("*"): digest for digest, name in lines}
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES}
    assert noted == there, "run `make web`"
    assert {path.stem for path in STATIC.glob("*.js")} == {
        path.stem for path in FRONT.glob("*.ts") if not path.name.endswith(".d.ts")
    }


def test_compiling_again_gives_the_same(tmp_path: Path) -> None:
    local = FRONT / "node_modules" / ".bin" / "tsc"
    compiler = str(local) if local.exists() else None
    if compiler is None or shutil.which("node") is None:
        pytest.skip("no TypeScript compiler here: `make web` installs it")
    subprocess.run([compiler, "--project", str(FRONT), "--outDir", str(tmp_path)], check=True, timeout=300)
    made = {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.js")}
    assert made == {path.name: path.read_text("utf-8") for path in STATIC.glob("*.js")}, "run `make web`"


def test_nothing_writes_markup() -> None:
    """Text from the zoo becomes text nodes: none of the ways to write markup is used."""
    for path in FRONT.glob("*.ts"):
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http"):
            text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
            assert word not in text, f"{path.name} has {word}"
