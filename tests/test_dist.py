"""What a wheel holds: everything that the package reads, and nothing of the tests. `make test-dist` installs one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "sosie"
NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib", "pot ": "POT "}  # on conda-forge, and here


def _left_out(path: Path) -> bool:
    return "__pycache__" in path.parts or SOURCE / "web" / "frontend" in path.parents


def test_a_wheel_holds_the_package_and_nothing_else() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    held = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    there = {
        path.relative_to(ROOT / "src").as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and not _left_out(path)
    }
    assert held == there | {"pytest_sosie.py"}
    for needed in (
        "py.typed",
        "report/page/template.html.jinja",
        "data/files/demo-fashion-mnist-3k.npz",
        "web/static/app.js",
    ):
        assert f"sosie/{needed}" in held


def test_the_version_is_the_same_everywhere() -> None:
    import sosie

    says = {
        "CITATION.cff": "version: {}\n",
        "CHANGELOG.md": "# Changelog\n\n## {}\n",
        "conda/meta.yaml": 'version = "{}"',
    }
    for name, words in says.items():
        assert words.format(sosie.__version__) in (ROOT / name).read_text("utf-8"), name


def test_the_start_page_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    assert [name for name in extras if name not in ("dev", "bench") and f"`{name}`" not in page] == []


def test_the_oldest_packages_tested_are_the_least_allowed() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    made = re.search(r"^TESTED := \.\[(.*)\]$", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)[1]
    extras = made.split(",")
    allowed = [*about["dependencies"], *(each for name in extras for each in about["optional-dependencies"][name])]
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text("utf-8"), flags=re.M))
    recipe = re.sub(
        "pytorch|matplotlib-base|pot ", lambda match: NAMES[match[0]], (ROOT / "conda" / "meta.yaml").read_text("utf-8")
    )
    for package in allowed:
        name, least = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<\d+)?", package).groups()
        assert re.fullmatch(rf"{re.escape(least)}(\.0)*", tested[name]), package
        assert re.search(rf"^ +- {name} >={re.escape(least)}(,<\d+)?$", recipe, flags=re.M), package
