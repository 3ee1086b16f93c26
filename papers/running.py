"""Runs a paper's experiments one by one: each writes its results when it is done, so that a run can be resumed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from claims import check_claims

from sosie.files import write_atomically

Experiment = Callable[[Any], dict[str, Any]]  # settings → {"numbers": {name: number}, and whatever figures need}


def start(
    paper: Path,
    experiments: Mapping[str, Experiment],
    settings: Callable[[str, Path, Path], Any],
    small: Callable[[Any], Any],
    of_records: Mapping[str, Callable[[Path], dict[str, Any]]] | None = None,
) -> None:
    """A paper's command line: `settings(device, results, folder of networks)`, or `small` of them for a smoke run.

    `of_records`: experiments whose results can be made of what lies in results/records, where a run has not ended.
    """
    given = _parse(paper, experiments, of_records or {})
    if given.records:
        for name, make in (of_records or {}).items():
            whole = {"experiment": name, "small": False, **make(given.results / "records")}
            (given.results / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        return
    nets = Path(os.environ.get("SOSIE_CHECKPOINTS", given.results / "nets" if given.small else paper / "nets"))
    chosen = settings(given.device, given.results, nets)
    if given.small:
        torch.set_num_threads(1)  # more than one only wait for each other
    _run(paper, experiments, small(chosen) if given.small else chosen, given)


def _parse(paper: Path, experiments: Mapping[str, Experiment], of_records: Mapping[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Reproduce the claims of papers/{paper.name}.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(experiments)}")
    parser.add_argument("--small", action="store_true", help="a smoke run: its numbers mean nothing")
    parser.add_argument("--resume", action="store_true", help="keep the results that are there")
    if of_records:
        told = f"only write {', '.join(of_records)} again, of the parts in results/records"
        parser.add_argument("--records", action="store_true", help=told)
    parser.set_defaults(records=False)
    parser.add_argument("--results", type=Path, help="the folder to write to")
    given = parser.parse_args()
    given.only = [name.strip() for name in given.only.split(",") if name.strip()] or list(experiments)
    if unknown := sorted(set(given.only) - set(experiments)):
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(experiments)}")
    given.results = given.results or paper / ("small" if given.small else "results")
    return given


def _run(paper: Path, experiments: Mapping[str, Experiment], settings: Any, given: argparse.Namespace) -> None:
    """Every experiment that was asked for, then the verdicts on all claims; one that fails does not stop the others."""
    failed: list[str] = []
    given.results.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        path = given.results / f"{name}.json"
        if given.resume and path.is_file():
            print(f"{name}: kept", flush=True)
            continue
        start = time.perf_counter()
        try:
            found = experiments[name](settings)
        except Exception:  # the others go on: a run is long
            failed.append(name)
            traceback.print_exc()
            continue
        seconds = round(time.perf_counter() - start, 1)
        whole = {
            "experiment": name,
            "seconds": seconds,
            "ran_on": describe(given.device),
            "small": given.small,
            **found,
        }
        path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        print(f"{name}: {seconds:.0f} s", flush=True)
        for key, value in found["numbers"].items():
            print(f"    {key} {value if value is None else format(value, '.4g')}", flush=True)
    if given.small:
        print("a smoke run: the verdicts below mean nothing")
    check_claims(paper, given.results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def describe(device: str) -> str:
    chip = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine() + " CPU"
    return f"{chip}, torch {torch.__version__}"


def remember(
    folder: Path,
    name: str,
    asked: Mapping[str, Any],
    make: Callable[[], dict[str, Any]],
    records: Path | None = None,
) -> dict[str, Any]:
    """One part of an experiment, written to the folder when it is done: a run that was ended goes on behind it.

    `asked` is all that decides the part, as JSON: whatever differs there is another file. `records` has parts of
    earlier runs, which are taken as they are.
    """
    path = part_path(folder, name, asked)
    if records is not None and (earlier := part_path(records, name, asked)).is_file():
        path = earlier
    if path.is_file():
        print(f"  {name}: kept", flush=True)
    else:
        start = time.perf_counter()
        found = make()
        seconds = round(time.perf_counter() - start, 1)
        write_atomically(path, json.dumps({"asked": asked, "part_seconds": seconds, **found}) + "\n")
        print(f"  {name}: {seconds:.0f} s", flush=True)
    read: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return read


def part_path(folder: Path, name: str, asked: Mapping[str, Any], suffix: str = "json") -> Path:
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"{name}-{key}.{suffix}"
