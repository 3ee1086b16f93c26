"""The Python of docs/transformers.md runs as written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, blocks

GUIDE = ROOT / "docs" / "transformers.md"

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")


def test_there_is_something_to_run() -> None:
    assert len(blocks(GUIDE)) == 2


@pytest.mark.parametrize("number", range(len(blocks(GUIDE))))
def test_the_guide_runs_as_written(number: int, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", blocks(GUIDE)[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert "[[" in found.stdout
