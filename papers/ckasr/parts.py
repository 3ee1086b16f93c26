"""results/table-5-full.json of the seeds that all arms have in results/records: a run of all ten replaces it.

python papers/ckasr/parts.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

PAPER = Path(__file__).resolve().parent
sys.path.insert(0, str(PAPER.parent))  # what all papers share

from settings import Settings  # noqa: E402
from tables import table_5_full  # noqa: E402

ARMS = 3


def main() -> None:
    records = PAPER / "results" / "records"
    kept = [json.loads(path.read_text("utf-8")) for path in records.glob("*.json")]
    by_seed = [record["job"]["seed"] for record in kept]
    seeds = tuple(sorted(seed for seed in set(by_seed) if by_seed.count(seed) == ARMS))
    settings = Settings("cpu", PAPER / "results", records)
    whole = {
        "experiment": "table-5-full",
        "seconds": sum(record["seconds"] for record in kept),
        "ran_on": "NVIDIA H200, torch 2.11.0+cu130",
        "small": False,
        "seeds": {"run": list(seeds), "asked_for": list(settings.table_5_seeds)},
        **table_5_full(replace(settings, table_5_seeds=seeds)),
    }
    (PAPER / "results" / "table-5-full.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
