"""The README's Python runs as written, and the table of measures is the registry's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), flags=re.S)


@pytest.mark.parametrize("number", range(len(blocks(ROOT / "README.md"))))
def test_the_readme_runs_as_written(number: int, tmp_path: Path) -> None:
    code = blocks(ROOT / "README.md")[number]
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr


def test_the_table_of_measures_is_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from write_measures import table
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs" / "measures.md").read_text("utf-8") == table(), "run make docs"


def test_the_version_is_said_once_everywhere() -> None:
    import sosie

    assert f'version = "{sosie.__version__}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert f"version: {sosie.__version__}" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## {sosie.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
