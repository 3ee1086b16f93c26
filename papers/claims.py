"""A paper's claims as ranges, checked against what a run measured.

`papers/<name>/expected.toml` has one table a claim:

    [figure-5-cka]
    says = "The CKA value drops to lower than 0.7 (section 6.3)."
    measured = "figure-5/lowest_cka"      # the file results/figure-5.json, the key in its `numbers`
    high = 0.7                            # `low`, `high` or both
    kind = "number"                       # in the paper's text; "quality": our range for its words; "ours": no claim

`python papers/claims.py frankenstein` checks what lies in results/ again.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KINDS = ("number", "quality", "ours")


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the range that a measured number should be in."""

    name: str
    says: str
    measured: str
    low: float | None
    high: float | None
    kind: str

    def judge(self, value: float | None) -> str:
        if value is None:
            return "not run"
        above = self.low is None or value >= self.low
        below = self.high is None or value <= self.high
        return "reproduced" if above and below else "not reproduced"

    @property
    def range(self) -> str:
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


def read_claims(path: Path) -> list[Claim]:
    claims = []
    for name, table in tomllib.loads(path.read_text("utf-8")).items():
        unknown = set(table) - {"says", "measured", "low", "high", "kind"}
        if unknown or not {"says", "measured", "kind"} <= set(table) or not {"low", "high"} & set(table):
            raise ValueError(f"{path} [{name}]: a claim has says, measured, kind, and low or high; got {sorted(table)}")
        if table["kind"] not in KINDS:
            raise ValueError(f"{path} [{name}]: kind is one of {', '.join(KINDS)}, not {table['kind']!r}")
        bounds = [None if table.get(key) is None else float(table[key]) for key in ("low", "high")]
        claims.append(Claim(name, table["says"], table["measured"], *bounds, table["kind"]))
    return claims


def read_number(results: Path, measured: str) -> float | None:
    """The number of one experiment, or None where that experiment was not run."""
    experiment, _, key = measured.partition("/")
    path = results / f"{experiment}.json"
    if not path.is_file():
        return None
    numbers = json.loads(path.read_text("utf-8"))["numbers"]
    if key not in numbers:
        raise KeyError(f"{path} has no number {key!r}; it has {', '.join(numbers)}")
    return None if numbers[key] is None else float(numbers[key])


def check_claims(paper: Path, results: Path) -> list[dict[str, Any]]:
    """Every claim with the measured value and the verdict; printed, and written to verdicts.json."""
    verdicts = []
    for claim in read_claims(paper / "expected.toml"):
        value = read_number(results, claim.measured)
        verdicts.append({**asdict(claim), "value": value, "verdict": claim.judge(value)})
        shown = "" if value is None else f"{value:.4g}"
        print(f"{claim.name:42} {claim.judge(value):15} {shown:>9}   {claim.range}")
    if verdicts:
        results.mkdir(parents=True, exist_ok=True)
        (results / "verdicts.json").write_text(json.dumps(verdicts, indent=1) + "\n", "utf-8")
    counts = {word: sum(v["verdict"] == word for v in verdicts) for word in ("reproduced", "not reproduced", "not run")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return verdicts


if __name__ == "__main__":
    paper = Path(__file__).parent / (sys.argv[1] if len(sys.argv) > 1 else "")
    if not (paper / "expected.toml").is_file():
        sys.exit(__doc__)
    check_claims(paper, paper / "results")
