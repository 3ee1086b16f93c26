"""A paper's claims as ranges, and what our measurements say of them: one of four outcomes, with its reason.

`papers/<name>/expected.toml` has one table a claim:

    [figure-5-cka]
    says = "The CKA value drops to lower than 0.7 (section 6.3)."
    measured = "figure-5/lowest_cka"      # the file results/figure-5.json, the key in its `numbers`
    high = 0.7                            # `low`, `high` or both
    kind = "number"                       # in the paper's text; "quality": our range for its words; "ours": no claim
    paper = "0.7"                         # what the paper has, where the range does not show it
    exact = "a count"                     # why the number has no scatter
    same_as = "figure-5-other"            # the same number, or the statement that this is a cell of, is counted there
    added = "after the results: …"        # a claim, or what it is measured by, that was not fixed before the run
    decides = "both"                      # instead of what the setting has, with `because`
    needs = "ten networks"                # what would decide it

and one for each experiment whose setting is not the paper's:

    [settings.figure-5]
    epochs = [12, 160]                    # ours, the paper's
    decides = "neither"                   # or "both", "reproduction", "contradiction": what this setting can show
    because = "…"                         # why
    needs = "160 epochs"

Intervals come from `papers/<name>/intervals.py`. A claim is *reproduced* when all of the interval lies in its range,
*contradicted* when none of it does, and the setting can show that; else *undecided*.

`python papers/claims.py frankenstein` judges what lies in results/ again, and writes the tables of README.md; without
a name it does so for all papers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scatter import Found, Interval, reader

KINDS = ("number", "quality", "ours")
OUTCOMES = ("reproduced", "contradicted", "undecided", "not run")
CAN_SHOW = {
    "both": {"reproduced", "contradicted"},
    "reproduction": {"reproduced"},
    "contradiction": {"contradicted"},
    "neither": set(),
}
OPTIONAL = ("paper", "exact", "same_as", "added", "decides", "because", "needs")
PAPERS = Path(__file__).resolve().parent
OURS = "ours"  # the kind that no paper claims
MOST = 1000  # more units than this are not worth naming


@dataclass(frozen=True)
class Setting:
    """How far an experiment is from the paper's, and what it can show all the same."""

    distance: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    decides: str = "both"
    because: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the range that a measured number should be in."""

    name: str
    says: str
    measured: str
    low: float | None
    high: float | None
    kind: str
    paper: str = ""
    exact: str = ""
    same_as: str = ""
    added: str = ""
    decides: str = ""
    because: str = ""
    needs: str = ""

    @property
    def experiment(self) -> str:
        return self.measured.partition("/")[0]

    @property
    def range(self) -> str:
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"

    @property
    def bounds(self) -> tuple[float, float]:
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    def judge(self, value: float | None, interval: Interval | None = None, setting: Setting | None = None) -> Verdict:
        if setting is None or self.kind == OURS:  # a control is about our own run
            setting = Setting()
        needs = self.needs or setting.needs
        if value is None:
            return Verdict("not run", "no results" + (f"; needs {needs}" if needs else ""))
        if self.exact:
            interval = Interval(value, value, self.exact)
        if interval is None:
            return Verdict("undecided", f"one measurement without scatter; needs {needs or 'more runs'}")
        low, high = self.bounds
        if interval.low >= low and interval.high <= high:
            found, where = "reproduced", "inside"
        elif interval.high < low or interval.low > high:
            found, where = "contradicted", "outside"
        else:
            seen = f"{interval.of}, which would show {_short(interval.smallest_effect)}"
            more = _units_needed(value, interval, low, high)
            return Verdict("undecided", f"across {self.range}, {seen}; needs {needs or more}")
        over = f"{where}, {interval.of}"
        because = self.because if self.decides else setting.because
        if found not in CAN_SHOW[self.decides or setting.decides]:
            return Verdict("undecided", f"{over}, but {because}" + (f"; needs {needs}" if needs else ""))
        told = because and (self.decides or (found == "contradicted" and setting.distance))
        return Verdict(found, f"{over}; {because}" if told else over)


@dataclass(frozen=True)
class Verdict:
    outcome: str
    reason: str


def _units_needed(value: float, interval: Interval, low: float, high: float) -> str:
    """How many units would take the interval off the bounds that it lies across, if the value stays."""
    crossed = [edge for edge in (low, high) if interval.low <= edge <= interval.high]
    distance = min((abs(value - edge) for edge in crossed), default=0.0)
    if interval.units is None:
        return "more runs"
    half = (interval.high - interval.low) / 2
    number = math.inf if distance == 0 else interval.units * (half / distance) ** 2
    return f"more than {MOST}" if number > MOST else f"about {max(interval.units + 1, math.ceil(number))}"


def read_claims(path: Path) -> list[Claim]:
    claims = []
    tables = tomllib.loads(path.read_text("utf-8"))
    tables.pop("settings", None)
    for name, table in tables.items():
        unknown = set(table) - {"says", "measured", "low", "high", "kind", *OPTIONAL}
        if unknown or not {"says", "measured", "kind"} <= set(table) or not {"low", "high"} & set(table):
            raise ValueError(f"{path} [{name}]: a claim has says, measured, kind, and low or high; got {sorted(table)}")
        if table["kind"] not in KINDS:
            raise ValueError(f"{path} [{name}]: kind is one of {', '.join(KINDS)}, not {table['kind']!r}")
        if "decides" in table:
            _check_decides(f"{path} [{name}]", table)
        low, high = (None if table.get(key) is None else float(table[key]) for key in ("low", "high"))
        more = {key: str(table[key]) for key in OPTIONAL if key in table}
        claims.append(Claim(name, table["says"], table["measured"], low, high, table["kind"], **more))
    _check_counted_once(path, claims)
    return claims


def _check_decides(where: str, table: Mapping[str, Any]) -> None:
    if table["decides"] not in CAN_SHOW:
        raise ValueError(f"{where}: decides is one of {', '.join(CAN_SHOW)}, not {table['decides']!r}")
    if not table.get("because"):
        raise ValueError(f"{where}: what a setting decides has a reason: because")


def _check_counted_once(path: Path, claims: Sequence[Claim]) -> None:
    by_number: dict[str, str] = {}
    counted = {claim.name for claim in claims if not claim.same_as}
    for claim in claims:
        if claim.same_as and claim.same_as not in counted:
            raise ValueError(f"{path} [{claim.name}]: same_as {claim.same_as!r} is no claim that is counted")
        if not claim.same_as and by_number.setdefault(claim.measured, claim.name) != claim.name:
            first = by_number[claim.measured]
            raise ValueError(f"{path} [{claim.name}]: {claim.measured} is judged by [{first}] too: same_as says so")


def read_settings(path: Path) -> dict[str, Setting]:
    found = {}
    for name, table in tomllib.loads(path.read_text("utf-8")).get("settings", {}).items():
        distance = {key: value for key, value in table.items() if key not in ("decides", "because", "needs")}
        if wrong := [key for key, value in distance.items() if not isinstance(value, list) or len(value) != 2]:
            raise ValueError(f"{path} [settings.{name}]: {', '.join(wrong)}: ours and the paper's, two values")
        given = {"decides": "both", **table}
        _check_decides(f"{path} [settings.{name}]", given)
        found[name] = Setting(distance, given["decides"], given["because"], given.get("needs", ""))
    return found


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


def read_intervals(paper: Path, results: Path) -> Found:
    """What the paper's intervals.py computes from the results, by the numbers that claims measure."""
    path = paper / "intervals.py"
    if not path.is_file():
        return {}
    specification = importlib.util.spec_from_file_location(f"{paper.name}_intervals", path)
    if specification is None or specification.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    found: Found = module.intervals(reader(results))
    return found


def judge_all(paper: Path, results: Path) -> list[dict[str, Any]]:
    settings, intervals = read_settings(paper / "expected.toml"), read_intervals(paper, results)
    found = []
    for claim in read_claims(paper / "expected.toml"):
        value = read_number(results, claim.measured)
        interval = None if value is None else intervals.get(claim.measured)
        setting = settings.get(claim.experiment, Setting())
        verdict = claim.judge(value, interval, setting)
        exact = value if claim.exact else None
        found.append(
            {
                "name": claim.name,
                "kind": claim.kind,
                "counted": not claim.same_as,
                "says": claim.says,
                "measured": claim.measured,
                "low": claim.low,
                "high": claim.high,
                "value": value,
                "interval_low": interval.low if interval and not claim.exact else exact,
                "interval_high": interval.high if interval and not claim.exact else exact,
                "smallest_effect": interval.smallest_effect if interval and not claim.exact else None,
                "setting": dict(setting.distance),
                "outcome": verdict.outcome,
                "reason": verdict.reason,
                "added": claim.added,
            }
        )
    return found


def check_claims(paper: Path, results: Path) -> list[dict[str, Any]]:
    """Every claim with the measured value, its interval and the outcome; printed, and written to verdicts.json."""
    verdicts = judge_all(paper, results)
    for each in verdicts:
        shown = "" if each["value"] is None else f"{each['value']:.4g}"
        print(f"{each['name']:42} {each['outcome']:13} {shown:>9}   {each['reason']}")
    if verdicts:
        results.mkdir(parents=True, exist_ok=True)
        (results / "verdicts.json").write_text(json.dumps(verdicts, indent=1) + "\n", "utf-8")
    for whose, counts in count(verdicts).items():
        print(f"{whose}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return verdicts


def count(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Claims of the paper and controls of our own, apart; a number that is judged twice counts once."""
    counted = [each for each in verdicts if each["counted"]]
    groups = {
        "the paper's": [each for each in counted if each["kind"] != OURS],
        "our own": [each for each in counted if each["kind"] == OURS],
    }
    return {
        whose: {outcome: sum(each["outcome"] == outcome for each in group) for outcome in OUTCOMES}
        for whose, group in groups.items()
    }


def table(paper: Path, verdicts: Sequence[Mapping[str, Any]]) -> str:
    """All claims of a paper, one a row, then our own controls."""
    claims = {claim.name: claim for claim in read_claims(paper / "expected.toml")}
    counts, parts = count(verdicts), []
    for whose, own in (("the paper's", False), ("our own", True)):
        rows = [each for each in verdicts if (each["kind"] == OURS) == own]
        if not rows:
            continue
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts[whose].items())
        title = "Claims of the paper" if not own else "Controls of our own"
        parts += [f"**{title}: {sum(counts[whose].values())}** ({told})", ""]
        parts += [f"| claim | {'paper' if not own else 'range'} | ours | outcome | reason |", "|---|---|---|---|---|"]
        parts += [_row(claims[each["name"]], each) for each in rows]
        parts.append("")
    if any(each["added"] for each in verdicts):
        parts += [
            "\\* How these are judged was set or changed after results had been seen:",
            "",
            *_added(verdicts),
            "",
        ]
    parts.append(
        "Outcomes in brackets are not counted: another row has the number, or the statement that this is a part of."
    )
    return "\n".join(parts)


def _row(claim: Claim, verdict: Mapping[str, Any]) -> str:
    ours = "" if verdict["value"] is None else _short(verdict["value"])
    low, high = verdict["interval_low"], verdict["interval_high"]
    if low is not None and low != high:
        ours += f" ({_short(low)} to {_short(high)})"
    outcome = verdict["outcome"] if verdict["counted"] else f"({verdict['outcome']})"
    star = " \\*" if verdict["added"] else ""
    cells = [claim.says.rstrip(".") + star, claim.paper or claim.range, ours, outcome, verdict["reason"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _added(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    by_text: dict[str, list[str]] = {}
    for each in verdicts:
        if each["added"]:
            by_text.setdefault(each["added"], []).append(each["name"])
    return [f"- {text}: {', '.join(names)}" for text, names in by_text.items()]


def _short(number: float) -> str:
    if number == int(number) and abs(number) < 1e6:
        return f"{number:.0f}"
    return f"{number:.2g}" if abs(number) >= 1e4 or abs(number) < 1e-3 else f"{number:.3g}"


def between(text: str, name: str, new: str) -> str:
    """The text with what stands between a pair of markers replaced."""
    start, end = f"<!-- {name}: written by papers/claims.py -->", f"<!-- end of {name} -->"
    if start not in text or end not in text:
        raise ValueError(f"no {start} … {end}")
    return re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}\n{new}\n{end}", text, flags=re.DOTALL)


def papers_here(folder: Path = PAPERS) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/expected.toml"))


def table_of_counts(papers: Sequence[Path]) -> str:
    """One row a paper, its claims and our controls apart."""
    head = "| | " + " | ".join(OUTCOMES) + " | our own: " + " | ".join(OUTCOMES) + " |"
    rows = [head, "|---" * (1 + 2 * len(OUTCOMES)) + "|"]
    total = [0] * len(OUTCOMES)
    for paper in papers:
        counts = count(json.loads((paper / "results" / "verdicts.json").read_text("utf-8")))
        numbers = [list(counts[whose].values()) for whose in ("the paper's", "our own")]
        total = [a + b for a, b in zip(total, numbers[0], strict=True)]
        shown = [*(["–"] * len(OUTCOMES) if not any(numbers[0]) else map(str, numbers[0])), *map(str, numbers[1])]
        rows.append(f"| [{paper.name}]({paper.name}/README.md) | " + " | ".join(shown) + " |")
    whole = sum(total)
    left = total[2] + total[3]
    rows += ["", f"Of {whole} claims of the five papers {total[0]} were reproduced and {total[1]} contradicted; "
             f"{left}, or {100 * left / whole:.0f} %, are undecided or not run."]  # fmt: skip
    return "\n".join(rows)


def write_tables(paper: Path) -> None:
    verdicts = json.loads((paper / "results" / "verdicts.json").read_text("utf-8"))
    readme = paper / "README.md"
    readme.write_text(between(readme.read_text("utf-8"), "claims", table(paper, verdicts)), "utf-8")


def write_counts(folder: Path = PAPERS) -> None:
    readme = folder / "README.md"
    new = table_of_counts(papers_here(folder))
    readme.write_text(between(readme.read_text("utf-8"), "counts", new), "utf-8")


if __name__ == "__main__":
    names = sys.argv[1:] or [paper.name for paper in papers_here()]
    if not all((PAPERS / name / "expected.toml").is_file() for name in names):
        sys.exit(__doc__)
    for name in names:
        check_claims(PAPERS / name, PAPERS / name / "results")
        write_tables(PAPERS / name)
    write_counts()
