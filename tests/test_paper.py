"""The numbers of paper/paper.md are those that were measured: bench/results/ and the verdicts of papers/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from sosie.measures import MEASURES

ROOT = Path(__file__).resolve().parents[1]
PAPER = re.sub(r"\s+", " ", (ROOT / "paper" / "paper.md").read_text("utf-8"))


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text("utf-8"))


def by(rows: list[dict[str, Any]], key: str, value: str) -> dict[str, Any]:
    return next(row for row in rows if row[key] == value)


def of_the_passes(row: dict[str, Any], digits: int = 2) -> str:
    return f"{row['of the forward passes']:.{digits}f} times"


def sentences() -> dict[str, str]:
    """The words of the paper that hold a number, made from the files."""
    cpu, gpu = results("cpu")["rows"], results("gpu")
    ours, theirs, oldest = (
        by(cpu, "way", way) for way in ("sosie, blocks of 64", "pytorch-cka 1.1.3", "torch_cka 0.21")
    )
    leaves, blocks = gpu["126 x 126 leaf modules"], gpu["16 x 16 block outputs"]
    (leaf, peer_leaf), (block, peer_block) = (
        [by(rows, "way", way) for way in ("sosie", "pytorch-cka 1.1.3")] for rows in (leaves, blocks)
    )
    coverage = [
        row["covered"]
        for row in results("coverage")["coverage"]
        if (row["measure"], row["rows"]) == ("debiased_cka", 1024)
    ]
    timed = results("measures-one-thread")["rows"]
    ratios = [row["over the package"] for row in timed if row["over the package"] is not None]
    exact = [
        row["times faster"]
        for row in results("sites")["rows"]
        if row["measures"].startswith("CKA") and row["sosie"] == "exact"
    ]
    layer = by(results("zoo-search")["rows"], "stage", "indexed")["layer"]
    made = {
        "cpu": f"takes {of_the_passes(ours)} the bare forward passes, against {of_the_passes(theirs)} "
        f"with `pytorch-cka` and {of_the_passes(oldest, 0)} with `torch_cka`",
        "leaves": f"it takes {of_the_passes(leaf)} the forward passes and {leaf['peak GiB']:.1f} GiB, against "
        f"{of_the_passes(peer_leaf)} and {peer_leaf['peak GiB']:.0f} GiB",
        "blocks": f"{of_the_passes(peer_block)} against {of_the_passes(block)}, with {peer_block['peak GiB']:.0f} GiB "
        f"against {block['peak GiB']:.1f} GiB",
        "coverage": f"in {min(coverage):.1%} to {max(coverage):.1%} of cases".replace("%", " %"),
        "measures": f"Of the {len(timed)} measures that can be computed from two arrays and were timed on one thread, "
        f"{len(ratios)} are in another package: `sosie` takes a median of {median(ratios):.2f} of the fastest "
        f"package's time, and at most {max(ratios):.2f}.",
        "sites": f"computes exact CKA {int(min(exact))} to {int(max(exact))} times as fast",
        "zoo": f"the ten nearest are found in {1000 * layer:.1f} ms",
        "facts": f"It holds {len(MEASURES)} measures",
    }
    claims = [
        claim
        for path in ROOT.glob("papers/*/results/verdicts.json")
        for claim in json.loads(path.read_text("utf-8"))
        if claim["counted"] and claim["kind"] != "ours"
    ]
    right, wrong = (sum(claim["outcome"] == outcome for claim in claims) for outcome in ("reproduced", "contradicted"))
    made["claims"] = f"Of {len(claims)} claims {right} were reproduced and {wrong} contradicted"
    return made


@pytest.mark.parametrize("what", sentences())
def test_the_paper_quotes_what_was_measured(what: str) -> None:
    assert sentences()[what].lower() in PAPER.lower()
