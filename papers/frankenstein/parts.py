"""results/figure-2-ten.json of the pairs that have been run, from results/records: a run of all ten replaces it.

python papers/frankenstein/parts.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

from joining import mean, spread  # noqa: E402
from matching import CKAS, curves, lowest_between, numbers  # noqa: E402
from settings import RESNET_SITES, Settings  # noqa: E402


def rows_of(kind: str) -> list[dict[str, Any]]:
    paths = sorted((PAPER / "results" / "records").glob(f"{kind}-resnet20-ten-*.json"))
    return [row for path in paths for row in json.loads(path.read_text("utf-8"))["rows"]]


def main() -> None:
    rows, ckas = rows_of("stitch"), rows_of("cka")
    part = {"sites": list(RESNET_SITES), "rows": rows, "curves": curves(rows, RESNET_SITES)}
    found = {f"resnet20_{key}": value for key, value in numbers(rows, RESNET_SITES).items()}
    found["resnet20_least_squares_layer1.0_to_2.1"] = lowest_between(part)
    for key in CKAS:
        of = [row[key] for row in ckas]
        found |= {f"resnet20_{key}": mean(of), f"resnet20_{key}_spread": spread(of)}
    accuracies = {row["pair"][side]: row[f"accuracy_{'ab'[side]}"] for row in rows for side in (0, 1)}
    whole = {
        "experiment": "figure-2-ten",
        "seconds": None,
        "ran_on": "NVIDIA H200, torch 2.11.0+cu130",
        "small": False,
        "pairs": {"run": len({tuple(row["pair"]) for row in rows}), "asked_for": Settings.ten},
        "numbers": found,
        "accuracies": accuracies,
        "architectures": {"resnet20": part},
        "cka": ckas,
    }
    (PAPER / "results" / "figure-2-ten.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
