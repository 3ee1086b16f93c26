"""Names, caveats and provenance as text that is safe to show: whoever named a layer may have been hostile."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..results import (
    Closer,
    Comparison,
    Comparisons,
    Side,
    summarise,
    transfer_sentence_of_all,
    two_decimals,
)

LONGEST_NAME = 90  # in a sentence or a title; lists and tooltips show more


def visible(text: str) -> str:
    """The text with nothing in it that acts: controls, direction marks and half characters are spelt out."""
    if text.isprintable() and text.strip():
        return text
    if not text.strip():
        return "(no name)"
    return "".join(f"<U+{ord(c):04X}>" if _acts(c) else c for c in re.sub(r"[\t\r\n]+", " ", text))


def shorten(text: str, most: int) -> str:
    """Cut in the middle; where possible the tail starts at a number or at a part of a dotted name.

    The last number is kept in any case where there is room: it is what tells encoder_layer_3.attention from
    encoder_layer_11.attention.
    """
    if len(text) <= most:
        return text
    if most < 4:
        return text[: max(most - 1, 0)] + "…"
    starts = (found.start() for found in re.finditer(r"(?<!\d)\d|(?<=[._/])\w", text))
    tails = (len(text) - start for start in starts)
    tail = next((t for t in tails if 0.45 * most <= t <= 0.75 * most), math.floor(0.6 * most))
    number = re.search(r"\d+(?=\D*$)", text)
    if number is None or re.search(r"\d", text[len(text) - tail :]) or most < len(number[0]) + 6:
        return _joined(text, most, tail, "…")
    middle = f"…{number[0]}…"
    return _joined(text, most, math.ceil(0.7 * (most - len(middle))), middle)


def in_a_sentence(name: str) -> str:
    return shorten(visible(name), LONGEST_NAME)


def sentence(comparison: Comparison, measure: str) -> str:
    """What was found, in one sentence that can be shown."""
    return visible(summarise(_speakable(comparison), measure).sentence)


def _speakable(comparison: Comparison) -> Comparison:
    """With names that can stand in a sentence."""
    sides = []
    for side in (comparison.side_a, comparison.side_b):
        sites = tuple(map(in_a_sentence, side.sites))
        if len(set(sites)) < len(set(side.sites)):  # a name must still tell its layer from the others
            sites = tuple(map(visible, side.sites))
        sides.append(replace(side, name=in_a_sentence(side.name), sites=sites))
    return replace(comparison, side_a=sides[0], side_b=sides[1])


def sentence_of_all(comparisons: Comparisons, measure: str) -> str:
    """Which two of several models are most alike, and which least."""
    if comparisons.pairs and all(each.kind == "transfer" for each in comparisons):
        return visible(transfer_sentence_of_all([_speakable(comparison) for comparison in comparisons], measure))
    matrix = comparisons.matrix(measure)
    pairs = [pair for pair in comparisons.pairs if np.isfinite(matrix[pair])]
    if not pairs:
        return f"{visible(measure)} is undefined for every pair of models."
    up = comparisons.pairs[pairs[0]][measure].closer == "up"
    ordered = sorted(pairs, key=lambda pair: matrix[pair], reverse=up)
    first, last = (
        " and ".join(in_a_sentence(comparisons.names[k]) for k in pair) for pair in (ordered[0], ordered[-1])
    )
    best, worst = (two_decimals(matrix[pair]) for pair in (ordered[0], ordered[-1]))
    single = all(pair[measure].value.size == 1 for pair in comparisons)
    mean = (
        "mean over shifts"
        if any(each.kind == "shifts" for each in comparisons)
        else "mean over layers at the same depth"
    )
    over = "" if single else f", {mean}"
    if len(pairs) > 1 and math.isclose(matrix[ordered[0]], matrix[ordered[-1]], rel_tol=1e-6):
        return f"By {visible(measure)}, all pairs are equally alike ({best}{over})."
    text = f"By {visible(measure)}, {first} are the most alike ({best}{over})"
    return f"{text}." if len(pairs) == 1 else f"{text}, {last} the least ({worst})."


def note_on_weights(*records: dict[str, Any]) -> str:
    """A sentence that names the models whose weights are random, by the provenance of results; "" if none is known."""
    lines = dict.fromkeys(str(line) for record in records for line in record.get("models", ()))
    names = [in_a_sentence(line.partition(": ")[0]) for line in lines if ", random weights" in line]
    if not names:
        return ""
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if len(names) > 4:
        listed = f"{names[0]}, {names[1]} and {len(names) - 2} more models"
    return f"{listed} {'has' if len(names) == 1 else 'have'} random weights."


def direction(closer: Closer) -> str:
    return "higher is more alike" if closer == "up" else "lower is more alike"


def extent(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    if low is None and high is None:
        return "any number"
    if low is None:
        return f"at most {high:.4g}"
    return f"{low:.4g} or more" if high is None else f"{low:.4g} to {high:.4g}"


def size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


@dataclass(frozen=True)
class CaveatGroup:
    """Caveats with the same words; `where` holds (row, column), None standing for all of them."""

    text: str
    where: tuple[tuple[int | None, int | None], ...]
    pairs: int
    everywhere: bool
    of: str = "pair"  # what is counted

    @property
    def reach(self) -> str:
        return (
            f"concerns all {self.of}s"
            if self.everywhere
            else f"concerns {self.pairs} {self.of}{'s' * (self.pairs != 1)}"
        )

    def concerns(self, i: int, j: int) -> bool:
        return any(row in (None, i) and column in (None, j) for row, column in self.where)


def caveat_groups(comparison: Comparison, measure: str) -> list[CaveatGroup]:
    """The caveats of a measure, each text once, in the order they were given."""
    rows, columns = _places(comparison.side_a), _places(comparison.side_b)
    grouped: dict[str, list[tuple[int | None, int | None]]] = {}
    for caveat in comparison[measure].caveats:
        places = grouped.setdefault(caveat.text, [])
        for i in [None] if caveat.site_a is None else rows.get(caveat.site_a, []):
            for j in [None] if caveat.site_b is None else columns.get(caveat.site_b, []):
                places.append((i, j))
    groups = []
    for text, where in grouped.items():
        mask = np.zeros(comparison[measure].value.shape, dtype=bool)
        for i, j in where:
            mask[slice(None) if i is None else i, slice(None) if j is None else j] = True
        unique = tuple(dict.fromkeys(where))
        of = "layer" if comparison.kind == "transfer" else "pair"
        groups.append(CaveatGroup(visible(text), unique, int(mask.sum()), bool(mask.all()), of))
    return groups


def flat(record: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """A nested record as (dotted key, text) lines."""
    if isinstance(record, dict) and record:
        for key, value in record.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(record, (list, tuple)) and any(isinstance(v, (dict, list, tuple)) for v in record):
        for k, value in enumerate(record):
            yield from flat(value, f"{path}[{k}]")
    elif isinstance(record, (list, tuple)):
        yield visible(path), ", ".join(map(_plain, record)) or "none"
    else:
        yield visible(path), _plain(record)


def _joined(text: str, most: int, tail: int, middle: str) -> str:
    return text[: most - len(middle) - tail] + middle + text[len(text) - tail :]


def _plain(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(str(value)) if str(value).strip() else "(empty)"


def _acts(character: str) -> bool:
    """Controls, surrogates, line separators, and format characters other than those that join emoji."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf") and character not in "\u200c\u200d"


def _places(side: Side) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for k, site in enumerate(side.sites):
        places.setdefault(site, []).append(k)
    return places
