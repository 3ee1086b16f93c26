"""Names, caveats and provenance as text that is safe to show, since names of layers may be hostile."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from ..results import Closer

LONGEST_NAME = 90  # in a sentence or a title; lists and tooltips show more


def visible(text: str) -> str:
    """The text with control characters, direction marks and surrogates spelt out."""
    if text.isprintable() and text.strip():
        return text
    if not text.strip():
        return "(no name)"
    return "".join(f"<U+{ord(c):04X}>" if _acts(c) else c for c in re.sub(r"[\t\r\n]+", " ", text))


def shorten(text: str, most: int) -> str:
    """Cut a text in the middle; if possible the tail starts at a number or at a part of a dotted name.

    The last number is kept if it fits: it distinguishes encoder_layer_3.attention from encoder_layer_11.attention.
    """
    if len(text) <= most:
        return text
    if most < 4:
        return text[: max(most - 1, 0)] + "…"
    starts = (start.start() for start in re.finditer(r"(?<!\d)\d|(?<=[._/])\w", text))
    tails = (len(text) - start for start in starts)
    tail = next((t for t in tails if 0.45 * most <= t <= 0.75 * most), math.floor(0.6 * most))
    number = re.search(r"\d+(?=\D*$)", text)
    if number is None or re.search(r"\d", text[len(text) - tail :]) or most < len(number[0]) + 6:
        return _joined(text, most, tail, "…")
    middle = f"…{number[0]}…"
    return _joined(text, most, math.ceil(0.7 * (most - len(middle))), middle)


def in_a_sentence(name: str) -> str:
    return shorten(visible(name), LONGEST_NAME)


def note_on_weights(*records: dict[str, Any]) -> str:
    """A sentence that names the models with random weights, from the provenance of results; "" without any."""
    lines = dict.fromkeys(str(line) for record in records for line in record.get("models", ()))
    names = [line.partition(": ")[0] for line in lines if ", random weights" in line]
    return f"{listed(names, 'models')} {'has' if len(names) == 1 else 'have'} random weights." if names else ""


def listed(names: Sequence[str], kind: str | None = None) -> str:
    """Names as in "a, b and c"; with a `kind`, more than four of them as in "a, b and 5 more models"."""
    texts = [in_a_sentence(name) for name in names]
    if kind is not None and len(texts) > 4:
        return f"{texts[0]}, {texts[1]} and {len(texts) - 2} more {kind}"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


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
    """Whether it is a control, a surrogate, a line separator, or a format character that does not join emoji."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf") and character not in "\u200c\u200d"
