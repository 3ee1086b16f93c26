"""Dynamics that lie in the zoo's folder `runs/`: saved results, looked at through a slider."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from ..report.colour import full_scale
from ..report.words import visible
from ..results import THRESHOLDS, DamagedFile, Dynamics

MOST_BYTES = 32 * 2**20
MOST_RUNS = 1000


class UnknownRun(ValueError):
    """No run of that name."""


def listed(folder: Path) -> list[dict[str, Any]]:
    """The files of `runs/` by name; links are not followed."""
    found: list[dict[str, Any]] = []
    if (folder / "runs").is_symlink():
        return found
    try:
        entries = sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for entry in entries:
        if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False) and _decent(entry.name):
            found.append({"name": entry.name.removesuffix(".json"), "bytes": entry.stat(follow_symlinks=False).st_size})
    return found[:MOST_RUNS]


def _decent(name: str) -> bool:
    return name.isprintable() and "/" not in name and "\\" not in name


def stamp(folder: Path, name: str) -> tuple[int, int]:
    """Changes when the file does."""
    found = _placed(folder, name).stat()
    return found.st_mtime_ns, found.st_size


def _placed(folder: Path, name: str) -> Path:
    """The file of a run: one that is listed, or none. A name is never made into a path before that."""
    if name not in {run["name"] for run in listed(folder)}:
        raise UnknownRun(f"no run {visible(name[:200])!r} in the zoo's folder runs/")
    return folder / "runs" / f"{name}.json"


def opened(folder: Path, name: str) -> dict[str, Any]:
    """A run as the front end shows it."""
    path = _placed(folder, name)
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
        raise DamagedFile(f"{path.name} has {facts.st_size:,} bytes; runs of up to {MOST_BYTES:,} are shown")
    try:
        run = Dynamics.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), path.name)) from error
    return {
        "name": name,
        "names": [run.name_a, run.name_b],
        "two_runs": run.two_runs,
        "what": run.what,
        "sites": list(run.sites),
        "steps_a": list(run.steps_a),
        "steps_b": list(run.steps_b),
        "measures": [_measure(run, measure) for measure in run.values],
    }


def _measure(run: Dynamics, name: str) -> dict[str, Any]:
    values, scale = run[name], full_scale(run[name])
    settled = {} if run.two_runs else run.settled(THRESHOLDS[0], name)
    return {
        "name": name,
        "value": values.value.tolist(),
        "closer": values.closer,
        "ends": [scale.far, scale.alike],
        "threshold": THRESHOLDS[0],
        "settled": [settled.get(site) for site in run.sites],
        "caveats": list(dict.fromkeys(caveat.text for caveat in values.caveats)),
    }
