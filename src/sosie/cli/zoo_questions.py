"""`sosie zoo search | layers | map | …`: questions about the models of a zoo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .lists import split
from .zoo import open_zoo

if TYPE_CHECKING:
    from ..results import Answer

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
    found = open_zoo(folder).search(
        model, count, kind, site=split(sites), tag=tag or None, architecture=architecture, task=task, exact=not quick,
        symmetric=symmetric, **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)


def layers(
    folder: Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Sites = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False, device: Device = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """The layers of other models nearest to each layer of one."""
    found = open_zoo(folder).search(
        model, count, kind, "layer", site=split(sites), tag=tag or None, architecture=architecture, task=task,
        exact=not quick, **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)


def map_(
    folder: Folder, kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the models that a large map is laid out around.")] = 0,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """All models as points in the plane: alike ones near each other."""
    found = open_zoo(folder).map(kind, tag=tag or None, architecture=architecture, task=task, seed=seed)
    _tell(found, as_json, out, html)


def clusters(
    folder: Folder,
    count: Annotated[int | None, typer.Option("--count", "-k", min=1, help="How many; chosen if left out.")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """Models in groups that are alike."""
    found = open_zoo(folder).clusters(count, kind, tag=tag or None, architecture=architecture, task=task)
    _tell(found, as_json, out, html)


def duplicates(
    folder: Folder,
    threshold: Annotated[float | None, typer.Option(help="Similarity at every layer (1 - 1e-5).")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: AsJson = False, out: Out = None, html: Html = None,
) -> None:  # fmt: skip
    """Models that are there already: the same weights, or alike at every layer."""
    given = {} if threshold is None else {"threshold": threshold}
    found = open_zoo(folder).duplicates(kind=kind, tag=tag or None, architecture=architecture, task=task, **given)
    _tell(found, as_json, out, html)


def family(
    folder: Folder, model: Model, count: Count = 5, device: Device = None, as_json: AsJson = False, out: Out = None,
    html: Html = None,
) -> None:  # fmt: skip
    """Which models does one come from, or come from it?"""
    _tell(open_zoo(folder).family(model, count, **_on(device)), as_json, out, html)


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
    found = open_zoo(folder).recommend(
        data, count, probe_layer=layer, by=by, max_rows=inputs, trust=trust, tag=tag or None,
        architecture=architecture, task=task, **_on(device),
    )  # fmt: skip
    _tell(found, as_json, out, html)
    if not found.models:
        raise typer.Exit(1)


def index(folder: Folder, kind: Kind = "cka") -> None:
    """Make an index for large zoos, or bring it up to date; needs faiss, which the extra `zoo` brings."""
    found = open_zoo(folder).index(kind)
    typer.echo(
        f"{found['kind']}: {found['rows']:,} rows in {found['lists']:,} lists, {found['bytes'] / 2**20:,.1f} MiB"
    )


VERBS: dict[str, Callable[..., None]] = {
    "search": search, "layers": layers, "map": map_, "clusters": clusters, "duplicates": duplicates, "family": family,
    "recommend": recommend, "index": index,
}  # fmt: skip


def _on(device: str | None) -> dict[str, Any]:
    return {} if device is None else {"device": device}


def _tell(found: Answer, as_json: bool, out: Path | None, html: Path | None) -> None:
    """Files first: a reader of the output that goes away, as `| head` does, must not cost the answer."""
    from ..report import print_answer, write_report

    written = [found.save(out)] if out is not None else []
    written += [write_report(found, html)] if html is not None else []
    if as_json:
        typer.echo(json.dumps(found.rows(), indent=2, ensure_ascii=False))
    else:
        print_answer(found)
    for path in written:
        typer.echo(f"wrote {path}", err=as_json)
