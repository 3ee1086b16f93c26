"""Transfer scores: how much a model would have to adapt to data, from one pass and without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.caveats import of_left_out
from ..engine.network import is_sketch, names_of
from ..linalg import product
from ..process_state import products
from ..results import MEAN_EMBEDDING, TRANSFER, Caveat, Comparison, Comparisons, Estimate, Number, Side
from .comparing import named, open_sketch
from .kernels import mean_squared
from .sketches import Pairs, SiteSketch, Sketch, sketch

_Z = 1.959964  # of a 95 % interval
_BLOCK = 1024  # rows whose products are held at a time
_UNNAMED = ("list", "tuple", "DataLoader", "generator", "TensorDataset")  # descriptions of data without a name
_BOTH_WAYS = (
    "the paper reads this both ways: higher where the data are the model's own (sections 5.3 and 5.4), higher where "
    "there is more to adapt (appendix F); models and layers are ranked by mean_embedding instead"
)
_DIRECTIONS = {
    "mean_over_norm": _BOTH_WAYS,
    "log_mean_over_norm": _BOTH_WAYS,
    "mean_over_trace": "no direction is known: the paper finds it highest for one data set, for any training data",
}


def transfer(
    models: Any,
    data: Any = None,
    *,
    names: Sequence[str | None] | None = None,
    kernels: str | Sequence[str] = "hadamard",
    **sketching: Any,
) -> Comparison | Comparisons:
    """Score how much models would have to adapt to data, site by site (Tang et al. 2020, sections 5.3 and 5.4).

    `models` is a model or a sketch (`sosie.sketch`, or its file), or a list or {name: model} of them; `data` and the
    options of `sosie.sketch` are for models. With f a row of a site's features, g its gradient, K the kernel of f ⊗ g
    on N rows:

    - `mean_embedding`: ‖μ‖ = ‖E[g fᵀ]‖, the square root of the mean of K;
    - `kernel_norm`: ‖K‖_F / N², and `kernel_trace`: √(Tr K) / N;
    - `mean_over_norm` and `mean_over_trace`: ‖μ‖ over each of them (Eq. 19); `log_mean_over_norm`: Eq. 48.

    No score changes when a layer is scaled and the next layer scaled back. All but the first depend on N (‖K‖_F / N²
    falls as 1 / N, √(Tr K) / N as 1 / √N): compare them at equal N. The paper contradicts itself on their meaning:
    section 5.3 expects ‖μ‖ to be small for the model's own data and to grow with the adaptation needed, and finds
    ‖μ‖ / (‖K‖_F / N²) *higher* for a model's own data; appendix F reads a larger log of the same ratio as *more*
    adaptation. Here models and sites are ranked by `mean_embedding`, the smallest first, and all scores are shown.
    √(Tr K) / N is also the value of ‖μ‖ for rows that pull in unrelated directions; a `mean_embedding` that does not
    exceed it has a caveat. Deeper networks have larger norms: compare models at sites that correspond.

    Sums over rows are exact. ‖K‖_F comes from pairs among a few hundred sampled rows, and ‖μ‖ of sites wider than 1024
    from a TensorSketch; each then has a 95 % interval for the value from all rows. One model returns a Comparison with
    one column, the data; several return a Comparison for each: `scores["model", "data"]`.
    """
    several = isinstance(models, (list, tuple, Mapping))
    things, given = names_of(models if several else [models], names)
    if not things:
        raise ValueError("no models: give one, or a list of them")
    fresh = [thing for thing in things if not is_sketch(thing)]
    if fresh and data is None:
        raise TypeError("a model has transfer scores on data: transfer(model, data), or --data")
    if not fresh and (data is not None or sketching):
        raise ValueError("sketches need no data and no options of sketching: leave them out")
    if len(fresh) > 1 and isinstance(data, Iterator):
        raise TypeError("several models need data that can be read again: a list or a loader, not an iterator")
    parts = ("hadamard", *([kernels] if isinstance(kernels, str) else kernels))
    sketches, scores = [], []
    for thing, name in zip(things, given, strict=True):
        made = open_sketch(thing) if is_sketch(thing) else sketch(thing, data, kernels=parts, **sketching)
        made = named(made, name)
        with products():
            sites = zip(made.sites, made.side.sites, strict=True)
            scores.append([scores_of(site, made.n, exact=made.exact, label=label) for site, label in sites])
        sketches.append(replace(made, sites=(), _kernels={}))  # without the parts that take memory
    models = _names(
        sketches, lambda made: made.side.name, lambda a, b: (a.model, a.side.sites) == (b.model, b.side.sites)
    )
    of_data = _names(sketches, _data_name, _same_data)
    if not several:
        return _comparison(sketches[0], scores[0], models[0], of_data[0])
    if overlap := set(models) & set(of_data):
        raise ValueError(f"{', '.join(sorted(overlap))}: names both a model and data; rename one")
    labels = list(dict.fromkeys([*models, *of_data]))
    pairs: dict[tuple[int, int], Comparison] = {}
    for made, of_sites, model, name in zip(sketches, scores, models, of_data, strict=True):
        place = labels.index(model), labels.index(name)
        if place in pairs:
            raise ValueError(f"{model} on {name} was given twice")
        pairs[place] = _comparison(made, of_sites, model, name)
    return Comparisons(tuple(labels), pairs)


def _names(
    sketches: Sequence[Sketch], name: Callable[[Sketch], str], alike: Callable[[Sketch, Sketch], bool]
) -> list[str]:
    """A name for each sketch, the same for sketches that are alike; different ones of one name are numbered."""
    different: dict[str, list[Sketch]] = {}
    places = []
    for made in sketches:
        others = different.setdefault(name(made), [])
        place = next((k for k, other in enumerate(others) if alike(other, made)), len(others))
        others += [made] if place == len(others) else []
        places.append(place)
    texts = [name(made) for made in sketches]
    return [f"{text} ({k + 1})" if len(different[text]) > 1 else text for text, k in zip(texts, places, strict=True)]


def _data_name(made: Sketch) -> str:
    name = str(made.about.get("data", "the data"))
    return "the data" if name in _UNNAMED else name


def _same_data(a: Sketch, b: Sketch) -> bool:
    """Return whether two sketches whose data have one name are of the same rows, as far as is known."""
    if (a.size, a.seed, a.stack) != (b.size, b.seed, b.stack):
        return (a.n, a.spans) == (b.n, b.spans)
    return a.difference_from(b) is None


def _comparison(made: Sketch, scores: Sequence[Scores], model: str, data: str) -> Comparison:
    """The sites of one model against one data set."""
    estimates = {}
    for name in TRANSFER:
        value, error = np.array([of_site.values[name] for of_site in scores]).T[:, :, None]
        logarithm = name.startswith("log")
        low, high = (value + z * error if logarithm else value * np.exp(z * error) for z in (-_Z, _Z))
        known = bool((error > 0).any())
        estimates[name] = Estimate.of(
            Number("down", (None if logarithm else 0.0, None)),
            value,
            n=made.n,
            statistic=_statistic(name, scores),
            interval=(low, high) if known else (None, None),
            caveats=_caveats(name, made, scores),
        )
    about = {**made.about, "gradients of": made.output, "sketch": made.about.get("settings", {})}
    about.pop("settings", None)
    column = Side(data, (data,), (0,), ((),))
    return Comparison(replace(made.side, name=model), column, estimates, made.rows_rule, about, kind="transfer")


def _statistic(name: str, scores: Sequence[Scores]) -> str:
    """The source of the scores, in words: all rows, sampled pairs of rows, sketches of f ⊗ g."""
    sources = ["sums over all rows"]
    pairs, copies = (sorted({getattr(of_site, what) for of_site in scores} - {None}) for what in ("sampled", "columns"))
    if copies and name not in ("kernel_norm", "kernel_trace"):
        sources.append(f"wide sites by two TensorSketches of {copies[0]} columns")
    if pairs and "norm" in name:
        several = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else f"{pairs[0]}"
        sources.append(f"products of rows from all pairs of {several} sampled rows")
    return "; ".join(sources)


def _caveats(name: str, made: Sketch, scores: Sequence[Scores]) -> Iterator[Caveat]:
    yield from of_left_out(made.side)
    if name in _DIRECTIONS:
        yield Caveat(_DIRECTIONS[name])
    if name != MEAN_EMBEDDING:
        yield Caveat(f"changes with the number of rows: compare at equal N only (N = {made.n:,} here)")
    for site, of_site in zip(made.side.sites, scores, strict=True):
        if not np.isfinite(of_site.values[name][0]):
            yield Caveat("undefined: all gradients at this site are 0", site, undefined=True)
        elif name == MEAN_EMBEDDING and of_site.by_chance:
            yield Caveat(
                f"not above the value for rows that pull in unrelated directions (kernel_trace, "
                f"{of_site.values['kernel_trace'][0]:.3g}); take more inputs",
                site,
            )
        if of_site.folded is not None and "norm" in name:
            yield Caveat(
                f"rows were projected to {of_site.folded} columns before pairs were taken: ‖K‖ is too large; raise "
                "memory",
                site,
            )


# The scores of one site: sums over all rows, and over pairs of a few of them


@dataclass(frozen=True)
class Scores:
    """All scores of one site."""

    values: dict[str, tuple[float, float]]  # with the standard error of the logarithm; 0 for sums over all rows
    by_chance: bool  # rows that pull in unrelated directions could give this mean embedding
    sampled: int | None  # rows whose pairs were used; None for all
    columns: int | None  # of the sketches of f ⊗ g behind the mean embedding; None if it is from the rows themselves
    folded: int | None  # columns that rows were projected to before pairs were used


def scores_of(site: SiteSketch, n: int, *, exact: bool, label: str) -> Scores:
    """The scores of one site from the sketch of its n rows, which holds all of them if `exact`."""
    if site.pairs is None or site.fourth is None or site.trace is None:
        raise ValueError(f"{label}: no gradients, which transfer scores need: make the sketch with kernels='hadamard'")
    trace, fourth = float(site.trace), float(site.fourth)
    columns = sampled = folded = None
    if exact and site.features is not None and site.gradients is not None:
        total, squares = _all_pairs(site.features.rows, site.gradients.rows)
        squares_error = 0.0
        mean = math.sqrt(max(total, 0.0)) / n, 0.0  # a sum of 0 may be negative by rounding
        if site.moment is not None:
            mean = float(site.moment.norm()) / n, 0.0
    else:
        beside, spread = _sampled_pairs(site.pairs, n, label)
        squares = fourth + beside
        squares_error = spread / squares if squares > 0 else 0.0
        mean, columns = _mean_embedding(site, n, label)
        sampled = len(site.pairs.index) if len(site.pairs.index) < n else None
        width = site.pairs.features.shape[1]
        folded = width if width < site.width else None
    norm, root = (math.sqrt(squares) / n**2, squares_error / 2), (math.sqrt(trace) / n, 0.0)
    over_norm, over_trace = _ratio(mean, norm), _ratio(mean, root)
    log = math.log(over_norm[0]) if over_norm[0] > 0 else math.nan
    values = {
        "mean_embedding": mean,
        "kernel_norm": norm,
        "kernel_trace": root,
        "mean_over_norm": over_norm,
        "mean_over_trace": over_trace,
        "log_mean_over_norm": (log, over_norm[1]),
    }
    # With random signs ‖Σψ‖² is Tr K on average, with a variance of twice the squares off the diagonal.
    by_chance = (mean[0] * n) ** 2 <= trace + 2 * math.sqrt(2 * max(squares - fourth, 0.0))
    return Scores(values, by_chance, sampled, columns, folded)


def _ratio(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The ratio of two numbers with independent errors; NaN where the second is 0."""
    return (math.nan, 0.0) if b[0] == 0 else (a[0] / b[0], math.hypot(a[1], b[1]))


def _mean_embedding(site: SiteSketch, n: int, label: str) -> tuple[tuple[float, float], int | None]:
    """‖E[g fᵀ]‖ with the error of its logarithm, from the sum of g fᵀ where it was kept, else from its sketches."""
    if site.moment is not None and len(site.moment) == site.width:
        return (float(site.moment.norm()) / n, 0.0), None
    if site.hadamard is None:
        raise ValueError(
            f"{label}: {site.width} neurons are too many to keep the sum of g fᵀ, and there is no sketch of it: add "
            "'hadamard' to kernels="
        )
    copies, columns = site.hadamard.total.shape
    # The variance of ‖·‖² of one sketch is 2 / columns for a μ of high rank, and up to four times as large for rank 1.
    return (float(mean_squared(site.hadamard, n).sqrt()), math.sqrt(8 / (copies * columns)) / 2), columns


def _sampled_pairs(pairs: Pairs, n: int, label: str) -> tuple[float, float]:
    """Σ K_ij² over i ≠ j of all n rows, from the sampled rows, and its standard error by leaving one row out.

    Sampling is without replacement, so the error is smaller by √(1 − m/n), and 0 where all rows were drawn.
    """
    count = len(pairs.index)
    if n == 1:
        return 0.0, 0.0
    if count < min(n, 3):
        raise ValueError(f"{label}: {count} rows are too few for pairs, need at least 3")
    f, g = pairs.features.double(), pairs.gradients.double()
    squares = (product(f, f.T) * product(g, g.T)).square().fill_diagonal_(0)
    of_row = squares.sum(1)
    every = n * (n - 1) * of_row.sum() / (count * (count - 1))
    if count == n:
        return float(every), 0.0
    without = n * (n - 1) * (of_row.sum() - 2 * of_row) / ((count - 1) * (count - 2))
    variance = (count - 1) / count * (without - without.mean()).square().sum() * (1 - count / n)
    return float(every), float(variance.sqrt())


def _all_pairs(f: Tensor, g: Tensor) -> tuple[float, float]:
    """The sums of K_ij and of K_ij² over all rows."""
    total = squares = torch.zeros((), dtype=torch.float64, device=f.device)
    f, g = f.double(), g.double()
    for start in range(0, len(f), _BLOCK):
        kernel = product(f[start : start + _BLOCK], f.T) * product(g[start : start + _BLOCK], g.T)
        total, squares = total + kernel.sum(), squares + kernel.square().sum()
    return float(total), float(squares)
