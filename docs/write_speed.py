"""Write docs/speed.md from what the benchmark measured: bench/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from as_markdown import plain, table

PATH = Path(__file__).parent / "speed.md"
RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"

INTRODUCTION = """# Speed

The latest results of `make bench`. `make docs` writes this page from `bench/results/*.json`; no number is copied by
hand. The methods take turns within one run and medians are kept, so ratios are more reliable than seconds.
`bench/README.md` describes how each was measured, and the reference for the errors.

What to expect:

- Debiased CKA costs a fraction of the forward passes it needs; `linear_cka` and `kernel_alignment` read the same Gram
  matrices.
- Measures that factorise covariances (Procrustes, CCA, regression) or that read rows (`rsa`, `mutual_knn`, `rbf_cka`)
  take time for every pair of sites *after* the pass: seconds to minutes for hundreds of pairs of wide layers. On a CPU
  several pairs are computed at a time, each on one core. Choose sites, or pool with `rows="mean"`. Their cost in n, p
  and q is in the [table of measures](measures.md).
- A sketch of features and gradients costs little more than its passes on a CPU, and a multiple of them on a fast GPU; a
  little less with `kernels="hadamard"` alone.
- Training many small networks together takes a fraction of the time of training one after another.
- Memory does not grow with the number of rows; that of a sketch stops growing at a few thousand.
- On a GPU, Gram matrices are computed from TF32 products unless you set `precision="float32"`.
"""

TITLES = {
    "cpu": "On a CPU",
    "gpu": "On a GPU",
    "rows": "As the number of rows grows",
    "measures": "One pair of sites",
    "measures-one-thread": "One pair of sites on one core",
    "sites": "20 × 20 sites",
    "stitching": "Stitching in closed form",
    "joints": "Stitching layers trained together",
    "sketching": "Sketching on a CPU",
    "sketching-gpu": "Sketching on a GPU",
    "bures": "Normalised Bures similarity of sketches",
    "task2vec": "Fisher information",
    "weights": "Weights of many networks",
    "atoms": "Filter atoms on a CPU",
    "atoms-gpu": "Filter atoms on a GPU",
    "together": "Networks trained together on a CPU",
    "together-gpu": "Networks trained together on a GPU",
    "penalty": "Similarity as a term of the loss, on a CPU",
    "penalty-gpu": "Similarity as a term of the loss, on a GPU",
    "side-by-side-gpu": "Networks trained side by side on a GPU",
    "tokens": "Tokens dropped, on a CPU",
    "tokens-gpu": "Tokens dropped, on a GPU",
    "fingerprints-gpu": "Fingerprints on a GPU",
    "zoo-kills": "A zoo whose writer is killed",
    "startup": "Starting up",
    "coverage": "Coverage",
    "sketch-coverage": "Coverage for sketches",
}

# An explanation of the numbers, where the file's own description is not enough; in braces, numbers of the file.
WORDS = {
    "weights": """wcka of all {pairs:,} pairs of {networks} networks 784-32-32-32-32-10, every depth with every depth.
        *One call* gives the table of models by models with `matrix`; the chance and caveats of a pair are computed when
        the pair is read, and not counted. The loops multiply the weights of a network again for each pair and compare
        factors (*every pair of depths*) or kernels of 784 x 784 (*same depths only*); they were timed on {subset}
        pairs.""",
    "together": "Each network has its own seed and order of images, and ends as if trained alone, up to rounding.",
}
WORDS["together-gpu"] = WORDS["together"]
WORDS["penalty-gpu"] = """Eager steps: the GPU waits for each kernel to be launched, including those of the penalty.
    Recorded steps, as in `fit_side_by_side`, do not wait: see the next table."""
PUT_IN_WORDS = {"weights": ("networks", "layers", "pairs", "subset")}


def page() -> str:
    """The whole page; files that are not listed here get a section too, in order of their names."""
    known = [RESULTS / f"{stem}.json" for stem in TITLES]
    others = sorted(set(RESULTS.glob("*.json")) - set(known))
    return "\n".join([INTRODUCTION, *(_section(path) for path in [*known, *others] if path.exists())])


def _section(path: Path) -> str:
    facts = json.loads(path.read_text("utf-8"))
    lines = [f"## {TITLES.get(path.stem, path.stem.replace('_', ' ').capitalize())}", ""]
    if "what" in facts:
        lines += [" ".join(facts.pop("what").split()), ""]
    if path.stem in WORDS:
        lines += [" ".join(WORDS[path.stem].format(**facts).split()), ""]
    facts = {key: value for key, value in facts.items() if key not in PUT_IN_WORDS.get(path.stem, ())}
    if "machine" in facts:
        lines += [f"*Measured on {_machine(facts.pop('machine'))}.*", ""]
    for title, value in facts.items():
        if title != "rows":
            lines += [f"**{title}**", ""]
        lines.append(_table(value))
    return "\n".join(lines)


def _machine(facts: dict[str, Any]) -> str:
    where = f"{facts['on']}, {facts['threads']} threads" if {"on", "threads"} <= set(facts) else ""
    rest = [f"{key} {value}" for key, value in facts.items() if not where or key not in ("on", "threads")]
    return ", ".join(filter(None, [where, *rest]))


def _table(value: Any) -> str:
    """A list of records as a table, one record as a table of one line, anything else as text."""
    records = value if isinstance(value, list) else [value]
    if not records or not all(isinstance(record, dict) for record in records):
        return ", ".join(_cell("", item) for item in records) + "\n"
    # Details within a record stay in the file.
    shown = [{key: item for key, item in record.items() if not isinstance(item, (dict, list))} for record in records]
    columns = list(dict.fromkeys(key for record in shown for key in record))
    cells = ([_cell(column, record.get(column)) for column in columns] for record in records)
    return table(columns, cells, numbers=True)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.1e}" if "error" in column else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return f"{text}×" if column.startswith("of the ") else text
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return plain(str(value))
