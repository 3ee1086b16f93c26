"""Write the leaderboard that docs/benchmark.md shows, from docs/leaderboard.json.

python docs/write_benchmark.py folder/leaderboard.json     # a run of `sosie benchmark`: what the page needs is kept
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from as_markdown import table

from sosie.files import write_atomically
from sosie.results import Leaderboard

PATH = Path(__file__).parent / "benchmark.md"
KEPT = Path(__file__).parent / "leaderboard.json"
BEGIN, END = "<!-- made by docs/write_benchmark.py -->\n", "<!-- up to here -->\n"
FIRST = 10
NOTABLE = (
    "mutual_knn", "deconfounded_cka", "svcca", "rsa", "mean_cca", "intrinsic_dimension_difference", "bures_distance",
    "weight_cosine", "spectrum_distance",
)  # fmt: skip


def keep(found: Leaderboard) -> dict[str, Any]:
    """The numbers that sum measures up, and the correlations of each kind of pair; not the value of every pair."""
    entries = {entry.name: entry for entry in found}
    rows = [
        {
            **row,
            "kinds": {kind: {name: one for name, one in found["groups"]["all"].items() if name != "why"}
                      for kind, found in entries[row["measure"]].grounding.items()},
            "against_the_first": entries[row["measure"]].against,
        }
        for row in found.rows()
    ]  # fmt: skip
    whole = {"scale": found.scale, "data": found.data, "pairs": found.pairs, "provenance": found.provenance}
    return _rounded({**whole, "rows": rows})


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.5g}") if isinstance(found, float) else found


def page() -> str:
    """The page as it is, with the table made anew."""
    before, _, rest = PATH.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + _table(json.loads(KEPT.read_text("utf-8"))) + "\n" + END + after


def _table(found: dict[str, Any]) -> str:
    kinds = list(found["pairs"])
    head = ["measure", "rank", "ρ", *(f"ρ {kind}" for kind in kinds), "r", "AUC", "moved", "noticed", "ms"]
    shown = [row for k, row in enumerate(found["rows"]) if k < FIRST or row["measure"] in NOTABLE]
    return table(head, (_cells(row, kinds) for row in shown), numbers=True)


def _cells(row: dict[str, Any], kinds: list[str]) -> list[str]:
    correlations = [row["kinds"].get(kind, {}).get("spearman", {}).get("value") for kind in kinds]
    numbers = [row["spearman"], *correlations, row["pearson"], row["auc"], row["moved_in_vain"], row["noticed"]]
    cells = [_number(value) for value in numbers]
    return [f"`{row['measure']}`", str(row["rank"] or "–"), *cells, f"{1000 * row['seconds']:.1f}"]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}".replace("-", "−")


if __name__ == "__main__":
    text = json.dumps(keep(Leaderboard.load(sys.argv[1])), ensure_ascii=False, separators=(",", ":")) + "\n"
    print(f"wrote {write_atomically(KEPT, text)}")
    print(f"wrote {write_atomically(PATH, page())}")
