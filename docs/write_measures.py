"""Write docs/measures.md from the registry: a table of facts, then every measure with its formula, by family."""

from __future__ import annotations

import sys
from pathlib import Path

from as_markdown import plain, prose, table

from sosie.measures import MEASURES, Measure
from sosie.measures.define import IMPLIED, TRANSFORMATIONS
from sosie.papers import PAPERS

PATH = Path(__file__).parent / "measures.md"

INTRODUCTION = """# Measures

Made by `make docs` from the registry. Each fact is declared beside the measure's code and tested both ways by
`tests/measures/test_laws.py`: an invariance that is not declared must be broken. `sosie measures` prints the same in a
terminal, `sosie.list_measures()` in Python. [Choosing a measure](choosing.md) says which one answers which question.

*n* rows (inputs, or positions), *p* and *q* columns (neurons of the two sides).
*Closer* says whether more alike is a higher (up) or a lower (down) value.
*Pairing*: whether row i of both sides must belong to the same input.
*Rows*: whether the measure needs the rows themselves; sosie then takes a seeded sample of them, and says so.
*Chance* is what rows give that have nothing to do with each other.
"""

COLUMNS = ("measure", "range", "closer", "invariant to", "pairing", "rows", "cost", "chance", "paper")


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _table(), _invariances()]
    for module, family in _families().items():
        parts.append(f"## {_title(module)}\n\n{prose(sys.modules[module].__doc__)}")
        parts += [_section(measure) for measure in family]
    return "\n".join(parts) + "\n" + _papers()


def _families() -> dict[str, list[Measure]]:
    """Measures by the module they are written in, both in the registry's order."""
    found: dict[str, list[Measure]] = {}
    for measure in MEASURES.values():
        found.setdefault(measure.function.__module__, []).append(measure)
    return found


def _title(module: str) -> str:
    return module.removeprefix("sosie.measures.").replace(".", " ").replace("_", " ").capitalize()


def _table() -> str:
    return table(COLUMNS, map(_cells, MEASURES.values()))


def _cells(measure: Measure) -> tuple[str, ...]:
    return (
        f"[`{measure.name}`](#{measure.name})",
        _range(measure),
        measure.closer,
        ", ".join(_strongest(measure.invariant)) or "nothing",
        _yes(measure.paired),
        _yes(measure.facts()["reads_rows"]),
        plain(measure.cost),
        plain(measure.chance),
        ", ".join(f"[{_short(key)}](#papers)" for key in _keys(measure)),
    )


def _strongest(invariant: frozenset[str]) -> list[str]:
    """Without those that follow from others: whoever is blind to rotations is blind to permutations."""
    implied = set().union(*(IMPLIED.get(name, set()) for name in invariant))
    return [name for name in TRANSFORMATIONS if name in invariant - implied]


def _invariances() -> str:
    lines = ["*Invariant to* names what may be done to either side without changing the value:", ""]
    for name, meaning in TRANSFORMATIONS.items():
        follows = [other for other in TRANSFORMATIONS if other in IMPLIED.get(name, set())]
        lines.append(f"- **{name}**: {meaning}" + (f" (so also {', '.join(follows)})" if follows else ""))
    return "\n".join(lines) + "\n"


def _section(measure: Measure) -> str:
    options = ", ".join(f"`{key}={value!r}`" for key, value in measure.defaults.items())
    facts = [
        f"reads {measure.reads.__name__}",
        f"{_range(measure)}, {_same(measure.same)} with itself",
        "symmetric" if measure.symmetric else "not symmetric",
        "has a gradient" if measure.differentiable else "no gradient",
        *(["needs equal widths"] if measure.same_width else []),
        *([f"aligned by {measure.aligned_by.name}"] if measure.aligned_by else []),
        *([f"also needs {', '.join(sorted(measure.needs))}"] if measure.needs else []),
        *([f"options {options}"] if options else []),
    ]
    return f"### {measure.name}\n\n{prose(measure.function.__doc__)}\n*{' · '.join(facts)}*\n"


def _keys(measure: Measure) -> list[str]:
    return [key.strip() for key in measure.paper.split(",") if key.strip()]


def _cited(key: str) -> str:
    if key not in PAPERS:
        names = ", ".join(measure.name for measure in MEASURES.values() if key in _keys(measure))
        raise KeyError(f"{names}: paper={key!r} has no line in sosie/papers.py")
    return PAPERS[key].citation


def _short(key: str) -> str:
    return _cited(key).partition(",")[0]


def _papers() -> str:
    cited = sorted({_cited(key) for measure in MEASURES.values() for key in _keys(measure)})
    return "\n".join(["## Papers", "", *(f"- {plain(paper)}" for paper in cited)]) + "\n"


def _range(measure: Measure) -> str:
    low, high = measure.bounds
    ends = "−∞" if low is None else _number(low), "∞" if high is None else _number(high)
    return "\N{NO-BREAK SPACE}…\N{NO-BREAK SPACE}".join(ends)


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


def _same(value: float | None) -> str:
    return "no fixed value" if value is None else _number(value)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
