"""Sketches compare like models: which of them may be compared, and how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...measures import Measure, find
from ...process_state import products
from ...results import Caveat, Comparison, Comparisons, Side
from ...stats import DebiasedAlignment, NotShared, Resketch, Sketch, SketchPair, check_seed, is_statistics
from ..provenance import provenance
from .evaluation import Evaluation, is_signed

Array = np.ndarray
KERNEL = "hadamard"
DEFAULT = "linear_cka"  # the default: debiased values of small sketches are noisy
UNPAIRED = ("linear_cka", "normalized_bures", "spectral_bures_distance")
_ROWS_WILL_DO = ("bures_distance",)  # reads rows, but only for their covariance, which buckets have too


def is_sketch(thing: Any) -> bool:
    """A sketch, or a file with one in it."""
    if isinstance(thing, (str, os.PathLike)):
        return Path(thing).suffix == ".safetensors" and is_statistics(thing, kind="sketch")
    return isinstance(thing, Sketch)


def open_sketch(thing: Any) -> Sketch:
    if isinstance(thing, Sketch):
        return thing
    if isinstance(thing, (str, os.PathLike)):
        return Sketch.load(thing)
    raise TypeError(f"need a sketch: make one with sosie.sketch(model, data), got {type(thing).__name__}")


def check_sketches(things: Sequence[Any], **settled: Any) -> None:
    """Complain about what is no sketch, and about options that were settled when the sketches were made."""
    for thing in things:
        if not is_sketch(thing) and Path(str(thing)).suffix != ".safetensors":  # opening those says what they are
            name = repr(thing) if isinstance(thing, (str, os.PathLike)) else type(thing).__name__
            raise TypeError(f"a sketch is compared with sketches: make one with sosie.sketch(model, data), got {name}")
    if wrong := [name for name, value in settled.items() if value is not None]:
        raise ValueError(
            f"{', '.join(wrong)}: not for sketches, which hold what they were made with; sketch.at(…) takes some of "
            "their sites"
        )


def compare_sketches(
    things: Sequence[Any], measures: Sequence[Measure], *, kernel: str, draws: int, seed: int
) -> Comparison | Comparisons:
    """Sketches of models on the same data, in the same buckets with the same signs; all pairs of them."""
    sketches = [open_sketch(thing) for thing in things]
    for other in sketches[1:]:
        sketches[0].check_shared(other)
    found = {
        (i, j): _compared(a, b, measures, kernel=kernel, draws=draws, seed=seed, shared=True)
        for i, a in enumerate(sketches)
        for j, b in enumerate(sketches)
        if i < j
    }
    if len(sketches) == 2:
        return found[0, 1]
    return Comparisons(tuple(sketch.side.name for sketch in sketches), found)


def compare_unpaired(
    sketch_a: Any,
    sketch_b: Any,
    *,
    measures: str | Measure | Sequence[str | Measure] = UNPAIRED,
    kernel: str = KERNEL,
    draws: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare sketches that share no rows: of different data, with different numbers of rows, or with other seeds.

    Kernels sketched apart have no row in common, so that the cosine of two of them is about how their variance is
    spread over directions and about the size of the sketch; what chance gives, from `draws` of other buckets and
    signs, is always beside it. `spectral_bures_distance` compares spectra without that detour, and `bures_distance`
    the covariances of sites whose neurons correspond: one network on two sets of data.
    """
    a, b = open_sketch(sketch_a), open_sketch(sketch_b)
    chosen = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
    if draws is not None and (not isinstance(draws, int) or draws < 2):
        raise ValueError(f"chance needs at least 2 draws, got {draws}")
    check_seed(seed)
    if a.exact or b.exact or a.size != b.size:
        sizes = " and ".join("one that kept every row" if k.exact else str(k.size) for k in (a, b))
        raise ValueError(
            f"without common rows only sketches of one size can be compared, got {sizes}; sketch both anew with one "
            "size"
        )
    if debiased := [m.name for m in chosen if m.reads is DebiasedAlignment]:
        raise ValueError(
            f"{', '.join(debiased)}: of common rows, of which there are none; linear_cka has chance beside it"
        )
    if a is not b:
        try:
            a.check_shared(b)
        except NotShared:
            pass
        else:
            raise ValueError(
                "these sketches are of the same rows with one seed: compare() says how alike they are; for independent "
                "sketches of the same data make one with another seed"
            )
    return _compared(a, b, chosen, kernel=kernel, draws=draws or 0, seed=seed, shared=False)


@products()
def _compared(
    a: Sketch, b: Sketch, measures: Sequence[Measure], *, kernel: str, draws: int, seed: int, shared: bool
) -> Comparison:
    _check_measures(measures, shared)
    pair = SketchPair(a.kernels(kernel), b.kernels(kernel), a.height, a.exact, a.stack)
    if not shared and a.seed == b.seed:
        # With one seed, bucket by bucket as many rows fell into both: a likeness that is not the networks'.
        pair = pair.redrawn(Resketch.draw(pair.size, seed, -1, signed=is_signed(pair)))
    sides = _apart(a.side, b.side)
    losses = None if a.output == b.output else (a.output, b.output)
    values = Evaluation(pair, sides, kernel, draws, seed, shared, losses).values(measures)
    mixing = tuple(Caveat(str(text)) for text in dict.fromkeys([a.about.get("mixing"), b.about.get("mixing")]) if text)
    values = {name: replace(found, caveats=found.caveats + mixing) for name, found in values.items()}
    settings: dict[str, Any] = {"kernel": kernel, "sketches": [repr(a), repr(b)], "shared": shared}
    settings["gradients of"] = " and ".join(dict.fromkeys([a.output, b.output]))
    models = [*a.about.get("models", []), *b.about.get("models", [])]
    about = provenance(settings=settings, models=models, data=a.about.get("data"))
    rule = " and ".join(dict.fromkeys([a.rows_rule, b.rows_rule]))
    return Comparison(*sides, values, f"{rule}, {kernel} kernel", {**about, "inputs": a.about.get("inputs", a.n)})


def _apart(a: Side, b: Side) -> tuple[Side, Side]:
    if a.name != b.name:
        return a, b
    return replace(a, name=f"{a.name} (A)"), replace(b, name=f"{b.name} (B)")


def _check_measures(measures: Sequence[Measure], shared: bool) -> None:
    if not measures:
        raise ValueError("no measures asked for; `sosie measures` lists them")
    for measure in measures:
        by_rows = measure.base in _ROWS_WILL_DO
        if measure.reads not in SketchPair.supplies and not by_rows:
            raise ValueError(
                f"{measure.name} reads rows or neurons, which a sketch has not: it supplies Gram matrices and "
                "covariances, for linear_cka, debiased_cka, kernel_alignment, normalized_bures, procrustes_angle …"
            )
