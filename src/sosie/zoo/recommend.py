"""Which model for these data? Transfer scores of each model, and how well one of its layers separates the classes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..capture import RULES
from ..checks import one_of, whole_number
from ..data import open_data
from ..engine.network import Network
from ..models import open_model, with_name
from ..progress import Progress
from ..results import MEAN_EMBEDDING, TRANSFER, Comparison, Recommendation, over_sites
from ..sketching import sketch, transfer
from ..sketching.classifiers import ridge_of_rows
from ..sketching.gradients import NoHead
from .search import none_passes
from .tasks import reason_of

if TYPE_CHECKING:
    from .zoo import Zoo

PROBE = "probe_accuracy"
FACTS = ("architecture", "parameters", "task", "tags", "source")
_CODE = re.compile(r"\.py\s*:")


def recommend(
    zoo: Zoo,
    data: Any,
    k: int,
    models: Mapping[str, Any] | None,
    *,
    by: str | None,
    trust: bool,
    probe_layer: str | int | None,
    max_rows: int,
    options: Mapping[str, Any],
    filters: Mapping[str, Any],
) -> Recommendation:
    """See `Zoo.recommend`."""
    whole_number(k, "k", least=1)
    probed = () if probe_layer is None else (PROBE,)
    what = f"by (the score to sort by; {PROBE} needs a probe layer)"
    by = one_of(by or (MEAN_EMBEDDING, *probed)[-1], what, (*TRANSFER, *probed))
    data = open_data(data) if isinstance(data, str) else data
    facts = {row["name"]: row for row in zoo.store.rows(**filters)}
    if models is not None and (unknown := [name for name in models if name not in zoo]):
        raise ValueError(f"{zoo.folder} has no model {unknown[0]!r}: add it, or leave it out of models=")
    options = {**({"rows": zoo.settings.rows} if zoo.settings.rows in RULES else {}), **options}
    names = list(facts) if models is None else [name for name in facts if name in models]
    if not names:
        raise none_passes(zoo, filters, "no model that passes the filters is in models=")
    if len(names) > 1 and isinstance(data, Iterator):
        raise TypeError("several models need data that can be read again: a list or a loader, not an iterator")
    rows = []
    with Progress("trying models", len(names), "models") as bar:
        for name in names:
            row = {"name": name, "rank": None, PROBE: None, **dict.fromkeys(TRANSFER), "probe_site": None}
            row |= {fact: facts[name][fact] for fact in FACTS} | {"reason": None}
            try:
                if models is not None:
                    model = open_model(models[name]) if isinstance(models[name], str) else models[name]
                else:
                    model, row["reason"] = _open_again(facts[name]["source"], facts[name]["digest"], trust)
                if row["reason"] is None:
                    row |= _scores(model, data, probe_layer, max_rows, options)
            except Exception as error:  # anything that a model or its file raises: go on with the others
                row["reason"] = reason_of(error)
            rows.append(row)
            bar.advance(note=name[:30])
    tried = [row for row in rows if row["reason"] is None and row[by] is not None]
    tried.sort(key=lambda row: row[by])
    if by == PROBE:  # on easy data many layers reach the same accuracy
        tried.sort(key=lambda row: (-row[PROBE], math.inf if row[MEAN_EMBEDDING] is None else row[MEAN_EMBEDDING]))
    for rank, row in enumerate(tried, 1):
        row["rank"] = rank
    failed = [row for row in rows if row["rank"] is None]
    for row in failed:
        row["reason"] = row["reason"] or f"{by} is undefined"
    asked = {
        "k": k, "by": by, "probe_layer": probe_layer, "inputs": max_rows, "tried": len(tried), "failed": len(failed),
        **filters,
    }  # fmt: skip
    order = "largest" if by == PROBE else "smallest"
    ties = f", equal ones by {MEAN_EMBEDDING}" if by == PROBE else ""
    notes = [f"Sorted by {by}, the {order} first{ties}; scores are means over a model's layers."]
    if by != PROBE:
        notes.append("Deeper networks have larger norms: compare models of one architecture only.")
        notes.append("Such scores hardly predict what fine-tuning gives: with labels, a probe layer does better.")
    return Recommendation(asked, tuple(tried[:k] + failed), tuple(notes))


def _open_again(source: str | None, digest: str, trust: bool) -> tuple[Any, str | None]:
    """Return the model that a source names, if it still is the one that was added; else None and the reason."""
    if source is None:
        return None, "it was added without a source: give it with models={name: model}"
    if _CODE.search(source) and not trust:
        return None, (
            f"its source, {source}, is Python code that would be run: give it with models={{name: model}}, or say "
            "trust=True (--trust) if the zoo's sources are yours"
        )
    model = open_model(source)
    module, name, prepare = with_name(model)
    now = Network(module, name, prepare=prepare).digest()
    if digest not in ("unknown", now):
        return None, f"its source, {source}, has other weights now ({now}, it was added with {digest})"
    return model, None


def _scores(
    model: Any, data: Any, probe_layer: str | int | None, max_rows: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the transfer scores of a model, and the accuracy of its probe layer."""
    probed = {} if probe_layer is None else _probe(model, data, probe_layer, max_rows, options)
    try:
        compared = transfer(model, data, max_rows=max_rows, **options)
    except NoHead as error:
        if not probed:
            raise NoHead(f"{error}; with labels, --probe-layer -1 (probe_layer=-1) needs no head") from error
        return probed
    assert isinstance(compared, Comparison)
    means = {name: over_sites(compared, name) for name in TRANSFER}
    return {name: mean if math.isfinite(mean) else None for name, mean in means.items()} | probed


def _probe(model: Any, data: Any, probe_layer: str | int, max_rows: int, options: Mapping[str, Any]) -> dict[str, Any]:
    # Rows averaged over space or tokens, so that all layers and models have few columns.
    own = {name: value for name, value in options.items() if name in ("prepare", "inputs", "device", "memory")}
    features: dict[str, Any] = {"size": None, "kernels": "features", "rows": "mean", **own}
    site = probe_layer
    if isinstance(probe_layer, int):
        sites = sketch(model, data, sites=options.get("sites"), max_rows=2, **features).side.sites
        if not -len(sites) <= probe_layer < len(sites):
            raise ValueError(f"no layer {probe_layer} to probe: it has {len(sites)} layers, {', '.join(sites)}")
        site = sites[probe_layer]
    kept = sketch(model, data, sites=site, max_rows=max_rows, **features)
    if kept.labels is None:
        raise ValueError("the data have no labels: a probe needs batches of (inputs, labels), with classes from 0 on")
    if len(kept.side.sites) > 1:
        raise ValueError(f"the probe layer {site!r} names {len(kept.side.sites)} layers: name one")
    kept_rows = kept.sites[0].features
    assert kept_rows is not None
    return {"probe_site": site, PROBE: left_out_accuracy(kept_rows.rows, kept.labels.argmax(1))}


def left_out_accuracy(rows: Tensor, labels: Tensor) -> float:
    """Return the share of rows (n, p) whose label (n,) ridge regression to one-hot targets predicts without that row.

    In closed form, exact for each penalty. The penalty with the least squared error at rows left out is taken from a
    grid, which makes the share slightly too high.
    """
    classes, numbers = labels.unique(return_inverse=True)
    if len(classes) < 2 or len(rows) < 3:
        raise ValueError(f"{len(rows)} inputs of {len(classes)} classes: a probe needs at least 3 of at least 2")
    x = rows.double()
    x = x - x.mean(0)
    if not bool(x.any()):
        raise ValueError(f"all {len(rows)} rows of the layer are the same: a probe cannot learn from them")
    targets = torch.eye(len(classes), dtype=torch.float64, device=x.device)[numbers]
    *_, residuals = ridge_of_rows(x, targets - targets.mean(0), None, balanced=True)
    return float(((targets - residuals).argmax(1) == numbers).double().mean())
