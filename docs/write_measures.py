"""Write docs/measures.md from the registry: a table of facts, then every measure with its formula, by family."""

from __future__ import annotations

import sys
from pathlib import Path

from as_markdown import plain, prose, table

from sosie.measures import MEASURES, Measure
from sosie.measures.define import IMPLIED, TRANSFORMATIONS

PATH = Path(__file__).parent / "measures.md"

PAPERS = {
    "atoms2023": "Anonymous 2023, Exploring neural network representational similarity using filter subspaces",
    "barannikov2022": "Barannikov et al. 2022, Representation topology divergence",
    "bhatia2019": "Bhatia et al. 2019, On the Bures–Wasserstein distance between positive definite matrices",
    "boixadsera2022": "Boix-Adserà et al. 2022, GULP: a prediction-based metric between representations",
    "bures1969": "Bures 1969, An extension of Kakutani's theorem on infinite product measures",
    "cristianini2001": "Cristianini et al. 2001, On kernel-target alignment",
    "cui2022": "Cui et al. 2022, Deconfounded representation similarity for comparison of neural networks",
    "diedrichsen2020": "Diedrichsen et al. 2020, Comparing representational geometries using whitened distances",
    "facco2017": "Facco et al. 2017, Estimating the intrinsic dimension of datasets",
    "geirhos2020": "Geirhos et al. 2020, Beyond accuracy: quantifying trial-by-trial behaviour of CNNs and humans",
    "gelfand1959": "Gelfand and Yaglom 1959, Calculation of the amount of information about a random function "
    "contained in another such function",
    "hamilton2016": "Hamilton et al. 2016, Cultural shift or linguistic drift?",
    "huh2024": "Huh et al. 2024, The platonic representation hypothesis",
    "ilharco2023": "Ilharco et al. 2023, Editing models with task arithmetic",
    "khosla2024": "Khosla and Williams 2024, Soft matching distance",
    "klabunde2023": "Klabunde and Lemmerich 2023, On the prediction instability of graph neural networks",
    "klabunde2025": "Klabunde et al. 2025, Similarity of neural network models: a survey",
    "kornblith2019": "Kornblith et al. 2019, Similarity of neural network representations revisited",
    "kriegeskorte2008": "Kriegeskorte et al. 2008, Representational similarity analysis",
    "li2015": "Li et al. 2015, Convergent learning",
    "lin1991": "Lin 1991, Divergence measures based on the Shannon entropy",
    "miao2021": "Miao et al. 2021, Continual learning with filter atom swapping",
    "may2019": "May et al. 2019, On the downstream performance of compressed word embeddings",
    "milanifard2016": "Milani Fard et al. 2016, Launch and iterate: reducing prediction churn",
    "mirsky1960": "Mirsky 1960, Symmetric gauge functions and unitarily invariant norms",
    "morcos2018": "Morcos et al. 2018, Insights on representational similarity with canonical correlation",
    "neyshabur2020": "Neyshabur et al. 2020, What is being transferred in transfer learning?",
    "nili2014": "Nili et al. 2014, A toolbox for representational similarity analysis",
    "pearson1895": "Pearson 1895, Note on regression and inheritance in the case of two parents",
    "raghu2017": "Raghu et al. 2017, SVCCA",
    "rudelson2007": "Rudelson and Vershynin 2007, Sampling from large matrices",
    "schonemann1966": "Schönemann 1966, A generalized solution of the orthogonal Procrustes problem",
    "song2012": "Song et al. 2012, Feature selection via dependence maximization",
    "szekely2007": "Székely et al. 2007, Measuring and testing dependence by correlation of distances",
    "szekely2013": "Székely and Rizzo 2013, The distance correlation t-test of independence in high dimension",
    "szekely2014": "Székely and Rizzo 2014, Partial distance correlation with methods for dissimilarities",
    "tang2020": "Tang et al. 2020, Similarity of neural networks with gradients",
    "tsitsulin2020": "Tsitsulin et al. 2020, The shape of data: intrinsic distance for data distributions",
    "wang2022": "Wang et al. 2022, Understanding weight similarity of neural networks via chain normalization",
    "wcka2025": "Anonymous 2025, Benchmarking a well-calibrated measure of weight similarity (under review at ICLR)",
    "wang2020": "Wang et al. 2020, Towards understanding the instability of network embedding",
    "wang_isola2020": "Wang and Isola 2020, Alignment and uniformity on the hypersphere",
    "williams2021": "Williams et al. 2021, Generalized shape metrics on neural representations",
    "yin2018": "Yin and Shen 2018, On the dimensionality of word embedding",
}


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
        *([f"also needs {', '.join(sorted(measure.needs))}"] if measure.needs else []),
        *([f"options {options}"] if options else []),
    ]
    return f"### {measure.name}\n\n{prose(measure.function.__doc__)}\n*{' · '.join(facts)}*\n"


def _keys(measure: Measure) -> list[str]:
    return [key.strip() for key in measure.paper.split(",") if key.strip()]


def _cited(key: str) -> str:
    if key not in PAPERS:
        raise KeyError(f"{key!r} is cited by a measure: give it a line in PAPERS, in {__file__}")
    return PAPERS[key]


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
