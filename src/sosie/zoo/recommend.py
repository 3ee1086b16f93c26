"""Which model for these data? Transfer scores of each, and how well a layer of it tells the classes apart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data import open_data
from ..engine.network import Network
from ..models import NamedModel, open_model, with_name
from ..progress import Progress
from ..results import MEAN_EMBEDDING, TRANSFER, Comparison, Recommendation, over_sites
from ..sketching import sketch, transfer
from .questions import whole_number
from .search import none_passes
from .tasks import reason_of

if TYPE_CHECKING:
    from .zoo import Asking


# How well a linear map of a layer's rows tells classes apart, at rows that it was not fitted to: in closed form

GRID = tuple(10 ** (half / 2) for half in range(-12, 9))  # penalties tried, in units of the mean eigenvalue


def left_out_accuracy(rows: Tensor, labels: Tensor) -> float:
    """Share of rows (n, p) whose label (n,) ridge regression to one-hot targets finds when that row is left out.

    Exact for each penalty; of the penalties on a grid that with the least squared error at rows left out is taken,
    which makes the share a little too good.
    """
    classes, found = labels.unique(return_inverse=True)
    if len(classes) < 2 or len(rows) < 3:
        raise ValueError(f"{len(rows)} inputs of {len(classes)} classes: a probe needs at least 3 of at least 2")
    x = rows.double()
    x = x - x.mean(0)
    targets = torch.eye(len(classes), dtype=torch.float64, device=x.device)[found]
    spectrum, vectors = torch.linalg.eigh(x @ x.T)
    spectrum = torch.where(spectrum > 0, spectrum, torch.zeros_like(spectrum))
    mean = float(spectrum.mean())
    if not mean > 0:
        raise ValueError(f"all {len(rows)} rows of the layer are the same: a probe has nothing to learn from them")
    share, error = 0.0, float("inf")
    for penalty in GRID:
        answers = _left_out(spectrum, vectors, targets, penalty * mean)
        now = float((answers - targets).square().sum())
        if now < error:
            error, share = now, float((answers.argmax(1) == found).double().mean())
    return share


def _left_out(spectrum: Tensor, vectors: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """What a ridge regression with an intercept answers at each row when it was fitted to the others."""
    shrunk = spectrum / (spectrum + penalty)
    centre = targets.mean(0)
    fitted = centre + vectors @ (shrunk[:, None] * (vectors.T @ (targets - centre)))
    leverage = vectors.square() @ shrunk + 1 / len(targets)
    return targets - (targets - fitted) / (1 - leverage)[:, None]


PROBE = "probe_accuracy"
INPUTS = 1000
_CODE = re.compile(r"\.py\s*:")


@dataclass(frozen=True)
class How:
    """What is done with each model."""

    probe_layer: str | int | None
    max_rows: int
    options: dict[str, Any]  # of `sosie.sketch`: sites, output, device …


class CannotOpen(ValueError):
    """Why a model cannot be tried."""


def recommend(
    zoo: Asking, data: Any, k: int, models: Mapping[str, Any] | None, by: str | None, trust: bool, how: How,
    filters: dict[str, Any],
) -> Recommendation:  # fmt: skip
    """See `Zoo.recommend`."""
    whole_number("k", k)
    by = by or (MEAN_EMBEDDING if how.probe_layer is None else PROBE)
    if by not in (*TRANSFER, PROBE) or (by == PROBE and how.probe_layer is None):
        raise ValueError(f"no score {by!r} to sort by: there are {', '.join(TRANSFER)}, and with a probe layer {PROBE}")
    data = open_data(data) if isinstance(data, str) else data
    facts = {row["name"]: row for row in zoo.store.rows(**filters)}
    if models is not None and (unknown := [name for name in models if name not in zoo]):
        raise ValueError(f"{zoo.folder} has no model {unknown[0]!r}: add it, or leave it out of models=")
    names = list(facts) if models is None else [name for name in facts if name in models]
    if not names:
        raise none_passes(zoo, filters, "no model that passes the filters is in models=")
    if len(names) > 1 and isinstance(data, Iterator):
        raise TypeError("several models need data that can be gone through again: a list or a loader, not an iterator")
    rows = []
    with Progress("trying models", len(names), "models") as bar:
        for name in names:
            given = None if models is None else models[name]
            rows.append(_tried(facts[name], given, data, trust, how))
            bar.advance(note=name[:30])
    return _answer(zoo, rows, k, by, how, filters)


def _answer(
    zoo: Asking, rows: list[dict[str, Any]], k: int, by: str, how: How, filters: dict[str, Any]
) -> Recommendation:
    tried = [row for row in rows if row["reason"] is None and row[by] is not None]
    tried.sort(key=lambda row: row[by])
    if by == PROBE:  # easy data are all got right from many a layer
        tried.sort(key=lambda row: (-row[PROBE], math.inf if row[MEAN_EMBEDDING] is None else row[MEAN_EMBEDDING]))
    for rank, row in enumerate(tried, 1):
        row["rank"] = rank
    left = [row for row in rows if row["rank"] is None]
    for row in left:
        row["reason"] = row["reason"] or f"{by} is undefined"
    asked = {
        "k": k, "by": by, "probe_layer": how.probe_layer, "inputs": how.max_rows, "tried": len(tried),
        "failed": len(left), **{name: value for name, value in filters.items() if value is not None},
    }  # fmt: skip
    order = "largest" if by == PROBE else "smallest"
    ties = f", equal ones by {MEAN_EMBEDDING}" if by == PROBE else ""
    notes = [f"Sorted by {by}, the {order} first{ties}; scores are means over a model's layers."]
    if by != PROBE:
        notes.append("Deeper networks have larger norms: hold models of one architecture against each other.")
        notes.append("Such scores hardly foretell what fine-tuning gives: with labels, a probe layer does better.")
    return Recommendation(asked, tuple(tried[:k] + left), tuple(notes))


def _tried(fact: dict[str, Any], given: Any, data: Any, trust: bool, how: How) -> dict[str, Any]:
    """A model's numbers, or the reason why it has none."""
    row: dict[str, Any] = {"name": fact["name"], "rank": None, PROBE: None, **dict.fromkeys(TRANSFER)}
    row |= {"probe_site": None} | {
        name: fact[name] for name in ("architecture", "parameters", "task", "tags", "source")
    }
    try:
        model = _opened(fact, given, trust)
        found = transfer(model, data, max_rows=how.max_rows, **how.options)
        assert isinstance(found, Comparison)
        scores = {name: over_sites(found, name) for name in TRANSFER}
        row |= {name: score if math.isfinite(score) else None for name, score in scores.items()}
        if how.probe_layer is not None:
            site = _site(found.side_a.sites, how.probe_layer)
            row |= {"probe_site": site, PROBE: _probed(model, data, site, how)}
    except Exception as error:  # whatever a model or its file raises: the rest goes on
        return row | {"reason": str(error) if isinstance(error, CannotOpen) else reason_of(error)}
    return row | {"reason": None}


def _opened(fact: dict[str, Any], given: Any, trust: bool) -> Any:
    """The model that was given, or that which its source names if it still is the one that was added."""
    if given is not None:
        return open_model(given) if isinstance(given, str) else given
    source = fact["source"]
    if source is None:
        raise CannotOpen("it was added without a source: give it with models={name: model}")
    if _CODE.search(source) and not trust:
        raise CannotOpen(
            f"its source, {source}, is Python code that would be run: give it with models={{name: model}}, or say "
            "trust=True (--trust) if the zoo's sources are yours"
        )
    found = open_model(source)
    module, name, prepare = with_name(found)
    digest = Network(module, name, prepare=prepare).digest()
    if fact["digest"] not in ("unknown", digest):
        raise CannotOpen(f"its source, {source}, has other weights now ({digest}, it was added with {fact['digest']})")
    return found


def _site(sites: tuple[str, ...], layer: str | int) -> str:
    if isinstance(layer, str):
        return layer
    try:
        return sites[layer]
    except IndexError:
        raise ValueError(f"no layer {layer} to probe: it has {len(sites)} layers, {', '.join(sites)}") from None


def _probed(model: NamedModel | Any, data: Any, site: str, how: How) -> float:
    """Rows averaged over space or tokens, so that all layers and models have few columns."""
    options = {name: value for name, value in how.options.items() if name in ("prepare", "inputs", "device", "memory")}
    kept = sketch(model, data, sites=site, size=None, kernels="features", rows="mean", max_rows=how.max_rows, **options)
    if kept.labels is None:
        raise ValueError(
            "the data have no labels that a probe could use: give batches of (inputs, labels), class numbers from 0 on"
        )
    if len(kept.side.sites) > 1:
        raise ValueError(f"the probe layer {site!r} names {len(kept.side.sites)} layers: name one")
    part = kept.sites[0].features
    assert part is not None
    return left_out_accuracy(part.rows, kept.labels.argmax(1))
