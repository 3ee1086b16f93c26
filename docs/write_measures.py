"""Write docs/measures.md, the table of measures, from the registry."""

from __future__ import annotations

from pathlib import Path

import sosie
from sosie.results import write_atomically

PAPERS = {
    "cristianini2001": "Cristianini et al. 2001, On kernel-target alignment",
    "geirhos2020": "Geirhos et al. 2020, Beyond accuracy: quantifying trial-by-trial behaviour of CNNs and humans",
    "huh2024": "Huh et al. 2024, The platonic representation hypothesis",
    "klabunde2023": "Klabunde and Lemmerich 2023, On the prediction instability of graph neural networks",
    "klabunde2025": "Klabunde et al. 2025, Similarity of neural network models: "
    "a survey of functional and representational measures",
    "kornblith2019": "Kornblith et al. 2019, Similarity of neural network representations revisited",
    "kriegeskorte2008": "Kriegeskorte et al. 2008, Representational similarity analysis",
    "lin1991": "Lin 1991, Divergence measures based on the Shannon entropy",
    "milanifard2016": "Milani Fard et al. 2016, Launch and iterate: reducing prediction churn",
    "morcos2018": "Morcos et al. 2018, Insights on representational similarity with canonical correlation",
    "pearson1895": "Pearson 1895, Note on regression and inheritance in the case of two parents",
    "raghu2017": "Raghu et al. 2017, SVCCA",
    "schonemann1966": "Schönemann 1966, A generalized solution of the orthogonal Procrustes problem",
    "song2012": "Song et al. 2012, Feature selection via dependence maximization",
    "szekely2014": "Székely and Rizzo 2014, Partial distance correlation with methods for dissimilarities",
    "tang2020": "Tang et al. 2020, Similarity of neural networks with gradients",
    "williams2021": "Williams et al. 2021, Generalized shape metrics on neural representations",
}


def table() -> str:
    lines = [
        "# Measures",
        "",
        "Made by `make docs` from the registry; each fact is tested, both ways, by `tests/measures/test_laws.py`",
        "and, for measures of outputs, `test_output_laws.py` (rows are then logits or numbers).",
        "n rows, p and q columns. *Invariant* is what may be done to either side without changing the value.",
        "",
        "| measure | what the number is | range | with itself | closer | invariant to | symmetric | gradient | cost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for facts in sosie.list_measures():
        low, high = (
            "−∞" if b is None and k == 0 else "∞" if b is None else f"{b:.4g}" for k, b in enumerate(facts["bounds"])
        )
        options = ", ".join(f"{key}={value!r}" for key, value in facts["defaults"].items())
        name = f"`{facts['name']}`" + (f" ({options})" if options else "")
        lines.append(
            f"| {name} | {facts['summary'].replace('|', chr(92) + '|')} | {low} … {high} | {_same(facts['same'])} | "
            f"{facts['closer']} | {', '.join(facts['invariant'])} | {_yes(facts['symmetric'])} | "
            f"{_yes(facts['differentiable'])} | {facts['cost']} |"
        )
    cited = {key.strip() for facts in sosie.list_measures() for key in facts["paper"].split(",")}
    lines += ["", "## Papers", "", *(f"- {PAPERS[key]}" for key in sorted(cited))]
    return "\n".join(lines) + "\n"


def _same(value: float | None) -> str:
    return "depends" if value is None else f"{value:g}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    print(f"wrote {write_atomically(Path(__file__).parent / 'measures.md', table())}")
