"""Runs a paper's scripts as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAPERS = Path(__file__).resolve().parents[2] / "papers"
if str(PAPERS) not in sys.path:
    sys.path.insert(0, str(PAPERS))  # claims, drawing


def run(*arguments: object, **variables: str) -> str:
    """What a script prints; variables are those of its environment."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def draw(paper: Path, results: Path) -> set[str]:
    """The names of the figures that were drawn."""
    return {Path(line).stem for line in run(paper / "draw.py", results).splitlines()}
