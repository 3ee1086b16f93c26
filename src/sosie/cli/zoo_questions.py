"""`sosie zoo search | layers | map | …`: questions about the models of a zoo."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .lists import split
from .spelling import as_typed
from .zoo_filters import filters

if TYPE_CHECKING:
    from ..results import Answer
    from ..zoo import Zoo

Folder = Annotated[Path, typer.Argument(metavar="ZOO", help="The folder of the zoo.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model of the zoo by name, a saved fingerprint, or any model.")
]
Kind = Annotated[str, typer.Option(help="cka, weights or atoms.")]
Tag = Annotated[list[str] | None, typer.Option(help="Only those with this tag; with all, if given again.")]
Architecture = Annotated[str | None, typer.Option(help="Only those of this architecture.")]
Task = Annotated[str | None, typer.Option(help="Only those trained for this.")]
Count = Annotated[int, typer.Option("--count", "-k", min=1, help="How many.")]
AsJson = Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")]
Out = Annotated[Path | None, typer.Option(help="Write the answer as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to look at.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Quick = Annotated[bool, typer.Option("--quick", help="By the short vectors alone.")]
Sites = Annotated[str | None, typer.Option(help="Layers of the model: names or globs, separated by commas.")]


def search(
    folder: Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Sites = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Best matches both ways, averaged.")] = False,
    device: Device = None, as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """The models nearest to one."""
    zoo = _open(folder, kind)
    found = zoo.search(
        model, count, kind, site=split(sites), exact=not quick, symmetric=symmetric,
        **filters(zoo, tag, architecture, task), **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)


def layers(
    folder: Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Sites = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False, device: Device = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """The layers of other models nearest to each layer of one."""
    zoo = _open(folder, kind)
    found = zoo.search(
        model, count, kind, "layer", site=split(sites), exact=not quick, **filters(zoo, tag, architecture, task),
        **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)


def map_(
    folder: Folder, kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the models that a large map is laid out around.")] = 0,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """All models as points in the plane: alike ones near each other."""
    zoo = _open(folder, kind)
    found = zoo.map(kind, seed=seed, **filters(zoo, tag, architecture, task))
    _tell(found, as_json, out, html)


def clusters(
    folder: Folder,
    count: Annotated[int | None, typer.Option("--count", "-k", min=1, help="How many; chosen if left out.")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """Models in groups that are alike."""
    zoo = _open(folder, kind)
    found = zoo.clusters(count, kind, **filters(zoo, tag, architecture, task))
    _tell(found, as_json, out, html)


def duplicates(
    folder: Folder,
    threshold: Annotated[float | None, typer.Option(help="Similarity at every layer (1 - 1e-5).")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """Models that are there already: the same weights, or alike at every layer."""
    given: dict[str, Any] = {} if threshold is None else {"threshold": threshold}
    zoo = _open(folder, kind)
    found = zoo.duplicates(kind=kind, **given, **filters(zoo, tag, architecture, task))
    _tell(found, as_json, out, html)


def family(
    folder: Folder, model: Model, count: Count = 5, device: Device = None, as_json: AsJson = False, out: Out = None,
    html: Html = None,
) -> None:  # fmt: skip
    """Which models does one come from, or come from it?"""
    _tell(_open(folder).family(model, count, **_on(device)), as_json, out, html)


def recommend(
    folder: Folder,
    data: Annotated[str, typer.Option(help="Your data: demo, npz:file, folder:path, cifar10, file.py:factory …")],
    count: Count = 5,
    probe_layer: Annotated[
        str | None, typer.Option(help="Also a linear probe of this layer: its name, or -2: the last but one.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Sort by this score.")] = None,
    inputs: Annotated[int, typer.Option(min=4, help="The first so many of the data.")] = 1000,
    trust: Annotated[bool, typer.Option("--trust", help="Run Python code that models were added from.")] = False,
    tag: Tag = None, architecture: Architecture = None, task: Task = None, device: Device = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """Which model for my data? By how much each would have to adapt, or by a quick probe."""
    layer = int(probe_layer) if probe_layer is not None and probe_layer.lstrip("-").isdigit() else probe_layer
    zoo = _open(folder)
    found = zoo.recommend(
        data, count, probe_layer=layer, by=by, max_rows=inputs, trust=trust,
        **filters(zoo, tag, architecture, task), **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)
    if not found.models:
        raise typer.Exit(1)


def index(folder: Folder, kind: Kind = "cka") -> None:
    """Make an index for large zoos, or bring it up to date; needs faiss, which the extra `zoo` brings."""
    found = _open(folder, kind).index(kind)
    typer.echo(
        f"{found['kind']}: {found['rows']:,} rows in {found['lists']:,} lists, {found['bytes'] / 2**20:,.1f} MiB"
    )


VERBS: dict[str, Callable[..., None]] = {
    "search": search, "layers": layers, "map": map_, "clusters": clusters, "duplicates": duplicates, "family": family,
    "recommend": recommend, "index": index,
}  # fmt: skip


def _open(folder: Path, kind: str | None = None) -> Zoo:
    """The zoo, if a model of it has vectors of that kind."""
    from ..zoo import Zoo
    from ..zoo.fingerprints import kind_of

    zoo = Zoo(folder)
    there = {kind_of(key) for key in zoo.views.kinds()} if len(zoo) else zoo.settings.kinds
    kinds = [one for one in zoo.settings.kinds if one in there]  # not the whole vectors, which are no kind to ask for
    if kind is not None and kind_of(kind) not in kinds:
        raise ValueError(f"--kind {kind}: {folder} has {', '.join(kinds)}")
    return zoo


def _on(device: str | None) -> dict[str, Any]:
    return {} if device is None else {"device": device}


def _as_typed(found: Answer) -> Answer:
    """With options where Python has arguments, in what the answer says in words."""
    rows = [row | {"reason": as_typed(row["reason"])} if row.get("reason") else row for row in found]
    return replace(found, found=tuple(rows), notes=tuple(map(as_typed, found.notes)))


def _tell(found: Answer, as_json: bool, out: Path | None, html: Path | None) -> None:
    """Files first: a reader of the output that goes away, as `| head` does, must not cost the answer."""
    from ..report import print_answer, write_report

    found = _as_typed(found)
    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    if as_json:
        typer.echo(json.dumps(found.rows(), indent=2, ensure_ascii=False))
    else:
        print_answer(found)
    for path in written:
        typer.echo(f"wrote {path}", err=as_json)
