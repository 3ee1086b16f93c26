"""Every experiment of the wCKA paper runs, on a handful of images; what is written down of it fits together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paper_scripts import PAPERS, draw, experiments_of, load, run, small_run, smoke

from sosie.data import open_images

PAPER = PAPERS / "wcka"
KINDS = ("seed", "epoch", "architecture", "strategy")
KEYS = ("lead", "wcka", "least_of_four", "best_rival", "worst_rival", "range_of_four")


def test_the_smoke_run(tmp_path: Path) -> None:
    try:
        for split in ("train", "test"):
            open_images("mnist", split=split, max_rows=1)
    except FileNotFoundError as error:
        pytest.skip(f"MNIST is not at hand: {error}")
    results = tmp_path / "results"
    verdicts = smoke(PAPER, results, SOSIE_WORKERS="0")
    # Theorems hold even here: wCKA keeps its value under symmetries, and does not see the order of classes.
    for name in ("invariance", "blind-rolled", "blind-biased", "figure-1a-wcka-random"):
        assert verdicts[name]["outcome"] == "reproduced", verdicts[name]
    kept = small_run(PAPER, results, "--resume", "--only", "networks")
    assert "networks: kept" in kept
    run(str(PAPER / "afterwards.py"), "--small", "--device", "cpu", "--results", str(results), SOSIE_WORKERS="0")
    again, first = (json.loads((results / f"{name}.json").read_text()) for name in ("afterwards", "figure-3"))
    for kind, parts in again["pairs"].items():  # the same networks, so the same numbers
        assert parts["all"]["pairs"] == parts["both learnt"]["pairs"] + parts["one did not"]["pairs"]
        own = first["correlations"]["wcka"][kind]["groups"]["all"]["pearson"]["value"]
        assert parts["all"]["all"]["pearson"]["values"]["wcka"] == pytest.approx(own)
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert draw(PAPER, results) == experiments_of(verdicts) | {"afterwards"}


def test_the_real_run_is_kept_under_what_it_was_asked_for() -> None:
    """The smoke run names its corruptions one by one, so it cannot tell."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(PAPER)!r})\n"
        "from dataclasses import asdict; from pathlib import Path; from run import Settings\n"
        "full = Settings('cpu', Path('r'), Path('c'), 0); hash(full)\n"
        "print(len(json.loads(json.dumps([asdict(full.scratch), asdict(full.heads)]))[0]['corruptions']))"
    )
    assert run("-c", code).strip() == "15"


def test_populations_are_averaged_and_their_scatter_narrows() -> None:
    intervals = load(PAPER, "intervals")

    def part(lead: float) -> dict[str, Any]:
        def one(value: float) -> dict[str, Any]:
            found = {"value": value, "over_models": [value - 0.3, value + 0.4]}
            return {kind: {"groups": {"all": dict.fromkeys(("pearson", "spearman"), found)}} for kind in KINDS}

        leads = {kind: {"all": one(lead)[kind]["groups"]["all"]} for kind in KINDS}
        return {
            "numbers": {f"{kind}_{c}_{key}": lead for kind in KINDS for c in ("pearson", "spearman") for key in KEYS},
            "correlations": {name: one(0.5 + lead * (name == "wcka")) for name in intervals.MEASURES},
            "leads": dict.fromkeys(intervals.RIVALS, leads),
        }

    found = intervals.of_populations({"populations": [part(0.1), part(0.3)]}, "figure-3", 75)
    interval = found["figure-3/seed_pearson_lead"]
    assert (interval.low, interval.high) == pytest.approx((0.2 - 0.3 / 2**0.5, 0.2 + 0.4 / 2**0.5))
    assert interval.of == "2 populations of 75 training runs, drawn again"
