"""What a wheel holds: everything that the package reads, and nothing of the tests. `make test-dist` installs one."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "sosie"


def _left_out(path: Path) -> bool:
    return "__pycache__" in path.parts or SOURCE / "web" / "frontend" in path.parents


def test_a_wheel_holds_the_package_and_nothing_else() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    held = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    there = {path.relative_to(ROOT / "src").as_posix() for path in SOURCE.rglob("*") if path.is_file() and not _left_out(path)}
    assert held == there
    for needed in ("py.typed", "report/page/template.html.jinja", "data/files/demo-fashion-mnist-3k.npz", "web/static/app.js"):
        assert f"sosie/{needed}" in held
