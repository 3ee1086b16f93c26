"""Runs a paper's scripts as a reader would."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from forked import python

PAPERS = Path(__file__).resolve().parents[2] / "papers"
if str(PAPERS) not in sys.path:
    sys.path.insert(0, str(PAPERS))  # claims, drawing


def run(*arguments: object, **variables: str) -> str:
    """What a script prints; variables are those of its environment."""
    done = python(*arguments, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def draw(paper: Path, results: Path) -> set[str]:
    """The names of the figures that were drawn."""
    return {Path(line).stem for line in run(paper / "draw.py", results).splitlines()}


def load(paper: Path, name: str) -> Any:
    """A module of the paper that needs no other of its modules, under a name of its own."""
    specification = importlib.util.spec_from_file_location(f"{paper.name}_{name}", paper / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def small_run(paper: Path, results: Path, *more: str, **variables: str) -> str:
    """What a smoke run prints."""
    return run(paper / "run.py", "--small", "--device", "cpu", "--results", results, *more, **variables)


def smoke(paper: Path, results: Path, **variables: str) -> dict[str, Any]:
    """The verdicts, by claim, of a smoke run in which each claim has an experiment."""
    small_run(paper, results, **variables)
    verdicts = {each["name"]: each for each in json.loads((results / "verdicts.json").read_text())}
    assert experiments_of(verdicts) <= {path.stem for path in results.glob("*.json")} - {"verdicts"}
    return verdicts


def experiments_of(verdicts: dict[str, Any]) -> set[str]:
    return {each["measured"].partition("/")[0] for each in verdicts.values()}


def pack(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    """Random images of ten classes under the name of a data set."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        images = random.integers(0, 256, (20, *shape), dtype=np.uint8)
        np.savez(folder / f"{name}-{split}1k.npz", images=images, labels=np.arange(20) % 10)
