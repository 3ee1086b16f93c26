"""`sosie papers`: which published claims were reproduced."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt

OUTCOMES = ("reproduced", "contradicted", "undecided", "not run")


def papers(
    context: typer.Context,
    name: Annotated[
        str | None, opt.argument(opt.INPUTS, "NAME", "Run this one; further arguments go to its run.py.")
    ] = None,
    folder: Annotated[
        Path | None,
        opt.option(opt.INPUTS, "FOLDER", "The folder papers/ of the repository of sosie.", default="searched for"),
    ] = None,
) -> None:
    """Which claims of published papers hold when they are run again?

    $ sosie papers
    $ sosie papers frankenstein --small
    """
    root = folder or _find()
    folders = sorted(path.parent for path in root.glob("*/expected.toml"))
    if name is None:
        for paper in folders:
            typer.echo(f"{paper.name:14} {_verdicts(paper)}")
        return
    chosen = root / name / "run.py"
    if not chosen.is_file():
        raise ValueError(f"no paper {name!r} in {root}; there are {', '.join(paper.name for paper in folders)}")
    raise typer.Exit(subprocess.run([sys.executable, str(chosen), *context.args], check=False).returncode)


def _find() -> Path:
    """Return papers/ here or beside the source: papers are in the repository, not in the package."""
    for place in (Path.cwd() / "papers", Path(__file__).resolve().parents[3] / "papers"):
        if any(place.glob("*/expected.toml")):
            return place
    raise FileNotFoundError("no folder papers/ here: papers are in sosie's repository; name it with --folder")


def _verdicts(paper: Path) -> str:
    """Count the paper's claims and, separately, our own controls; a number that is judged twice counts once."""
    claims = tomllib.loads((paper / "expected.toml").read_text("utf-8"))
    claims.pop("settings", None)
    verdicts = paper / "results" / "verdicts.json"
    if not verdicts.is_file():
        return f"{len(claims)} claims, not run yet"
    counted = [each for each in json.loads(verdicts.read_text("utf-8")) if each["counted"]]
    ours, theirs = (
        Counter(each["outcome"] for each in counted if (each["kind"] == "ours") == own) for own in (True, False)
    )
    counted = [("of the paper", theirs), ("of our own", ours)]
    return "; ".join(
        f"{sum(counts.values())} {whose}: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        for whose, counts in counted
        if counts
    )
