"""`sosie zoo …`: make, fill, search and repair a folder of fingerprints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt

if TYPE_CHECKING:
    from ..zoo import Zoo


HELP = "Many models in a folder, as fingerprints on one probe set: add, list, search, map, recommend …"
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for another writer.")]
Tag = Annotated[list[str] | None, typer.Option(help="Only models with this tag; repeat it to require several.")]
Architecture = Annotated[str | None, typer.Option(help="Only models of this architecture.")]
Task = Annotated[str | None, typer.Option(help="Only models trained for this task.")]
LISTED = ("name", "architecture", "parameters", "task", "tags", "sites", "parent")


def init(
    folder: opt.Folder,
    data: Annotated[str, typer.Option(help="Inputs for all models: demo, npz:file, folder:path …")],
    inputs: Annotated[int, typer.Option(min=4, help="Number of inputs.")] = 256,
    size: Annotated[int | None, typer.Option(help="Numbers of a short vector (512).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the projection.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Some of cka,weights,atoms; default: all.")] = None,
    rows: Annotated[str | None, typer.Option(help="flatten, mean, cls or last.")] = None,
) -> None:
    """Make a zoo: its probe set and the settings of fingerprints never change."""
    from ..zoo import Zoo

    if (folder / "zoo.sqlite").exists():
        raise FileExistsError(f"{folder} is a zoo already; `sosie zoo add {folder} MODEL` adds to it")
    made = Zoo(folder, data, inputs=inputs, size=size, seed=seed, kinds=opt.split(kinds), rows=rows)
    about = made.settings
    typer.echo(f"made {folder}: {about.n} inputs of hash {about.probe}, {', '.join(about.kinds)} of size {about.size}")


def add(
    folder: opt.Folder,
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="MODEL or NAME=MODEL; also a saved fingerprint.")
    ],
    tag: Annotated[list[str] | None, typer.Option(help="A tag for all of them; may be repeated.")] = None,
    task: Annotated[str | None, typer.Option(help="The task they were trained for.")] = None,
    parent: Annotated[str | None, typer.Option(help="The model that they were fine-tuned from.")] = None,
    sites: opt.Sites = None,
    device: opt.Device = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make fingerprints; 0: this one.")] = 0,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask cluster to make them: tcp://host:8786, or its .json.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace models of the same names.")] = False,
    wait: Wait = 10.0,
) -> None:
    """Add models; those that fail are recorded, and the others go on."""
    from ..report import print_table
    from ..zoo import Added
    from ..zoo.tasks import dask_cluster

    if dask is not None and workers:
        raise ValueError("a cluster has its own workers: give --dask or --workers, not both")
    zoo = open_zoo(folder, wait)
    named = _named(models)
    if dask is not None:
        typer.echo(f"connecting to {dask} …", err=True)
    with nullcontext() if dask is None else dask_cluster(dask) as executor:
        result = zoo.add(
            named, tags=tag or (), task=task, parent=parent, replace=replace, workers=workers, executor=executor,
            **opt.given(sites=opt.split(sites), device=device),
        )  # fmt: skip
    assert isinstance(result, Added)
    print_table(result.rows(), ("name", "outcome"))
    for name, reason in result.failed.items():
        typer.echo(f"- {_safe(name)}: {_safe(reason)}", err=True)
    typer.echo(f"{folder}: {_models(len(zoo))}")
    if parent is not None and parent not in zoo:
        typer.echo(f"note: no model {_safe(parent)!r} is in the zoo; it is recorded as the parent", err=True)
    if result.failed:
        raise typer.Exit(1)


def fingerprint(
    folder: opt.Folder,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, as for add.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write, .safetensors.")],
    sites: opt.Sites = None,
    device: opt.Device = None,
) -> None:
    """Write the fingerprint of a model without adding it: to search with, to look up in `sosie serve`, to send."""
    result = open_zoo(folder).fingerprint(model, **opt.given(sites=opt.split(sites), device=device))
    path = result.save(out)
    typer.echo(f"wrote {path}: {', '.join(result.kinds)}, {path.stat().st_size / 2**20:,.1f} MiB")


def list_(
    folder: opt.Folder,
    tag: Tag = None,
    architecture: Architecture = None,
    task: Task = None,
    limit: Annotated[int | None, typer.Option(min=1, help="List only so many.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Models that could not be added, and why.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the models."""
    from ..report import print_table
    from ..report.words import listed
    from ..zoo.listing import failures, models
    from ..zoo.store import Store, check_filters

    _check_there(folder)
    store, filters = Store(folder, wait=10.0), check_filters(tag, architecture, task)
    result = failures(store) if failed else models(store, filters, limit)
    if as_json:
        typer.echo(json.dumps(result.rows(), indent=2, ensure_ascii=False))
        return
    if failed:
        for row in result:
            typer.echo(f"- {_safe(row['name'])}: {_safe(row['reason'])} ({row['at']})")
    elif len(result):
        print_table(result.rows(), LISTED)
        for note in dict.fromkeys(note for row in result for note in row["notes"]):
            names = [_safe(row["name"]) for row in result if note in row["notes"]]
            typer.echo(f"- {_safe(note)}: {listed(names, 'models')}")
    typer.echo(f"{len(result):,} failed" if failed else f"{len(result):,} of {_models(store.count())}")
    if not failed and store.count() and (why := store.why_none(filters)):
        typer.echo(_safe(why))


def remove(
    folder: opt.Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models by name.")],
    wait: Wait = 10.0,
) -> None:
    """Remove models, all or none, and forget failed ones. `compact` frees their space."""
    zoo = open_zoo(folder, wait)
    zoo.remove(*names)
    typer.echo(f"removed {len(names)}; {folder}: {_models(len(zoo))}")


def tag(
    folder: opt.Folder,
    name: Annotated[str, typer.Argument(help="A model by name.")],
    add: Annotated[list[str] | None, typer.Option(help="A tag to add.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A tag to drop.")] = None,
    wait: Wait = 10.0,
) -> None:
    """Add tags to a model, or drop them."""
    zoo = open_zoo(folder, wait)
    if not add and not drop:
        raise ValueError("name tags: --add TAG, --drop TAG")
    zoo.tag(name, add=add or (), drop=drop or ())
    typer.echo(f"{_safe(name)}: {', '.join(map(_safe, zoo[name].tags)) or 'no tags'}")


def check(
    folder: opt.Folder,
    repair: Annotated[bool, typer.Option("--repair", help="Drop models that lost bytes, and report which.")] = False,
    data: Annotated[str | None, typer.Option(help="The data it was made with: restores a lost probe set.")] = None,
    wait: Wait = 10.0,
) -> None:
    """Check every byte; exit with status 1 if something is lost and was not dropped."""
    result = open_zoo(folder, wait, data).check(repair=repair)
    for row in result.rows():
        typer.echo(f"- {_safe(row['text'])}")
    typer.echo(_safe(result.sentence()))
    if result.lost and not repair:
        typer.echo("--repair drops the models that lost bytes and keeps the rest")
    if result.left:
        raise typer.Exit(1)


def export(
    folder: opt.Folder, out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, .sosiezoo.")]
) -> None:
    """Write the whole zoo as one file."""
    path = open_zoo(folder).export(out)
    typer.echo(f"wrote {path} ({path.stat().st_size / 2**20:,.1f} MiB)")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that export wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="ZOO", help="A new folder.")],
) -> None:
    """Make a zoo from an exported file; an inconsistent file is refused."""
    from ..zoo import Zoo

    typer.echo(f"made {folder}: {_models(len(Zoo.import_(file, folder)))}")


def compact(folder: opt.Folder, wait: Wait = 10.0) -> None:
    """Free the space of removed models."""
    typer.echo(f"{open_zoo(folder, wait).compact() / 2**20:,.1f} MiB given back")


VERBS: dict[str, Callable[..., None]] = {
    "init": init, "add": add, "list": list_, "remove": remove, "tag": tag, "fingerprint": fingerprint, "check": check,
    "export": export, "import": import_, "compact": compact,
}  # fmt: skip


def open_zoo(folder: Path, wait: float = 10.0, data: str | None = None) -> Zoo:
    from ..zoo import Zoo

    if data is not None:
        _check_there(folder)
    return Zoo(folder, data, wait=wait)


def _check_there(folder: Path) -> None:
    if not (folder / "zoo.sqlite").exists():
        raise FileNotFoundError(f"no zoo in {folder}; `sosie zoo init {folder} --data …` makes one")


def _models(number: int) -> str:
    from ..results import counted

    return counted(number, "model")


def _named(models: list[str]) -> dict[str, str]:
    """Return models by name: NAME=MODEL, MODEL by its own name, ARCHITECTURE@pattern as every matching weights file."""
    from glob import glob

    from ..zoo.tasks import default_name

    named: dict[str, str] = {}
    for text in models:
        name, model = (None, text) if Path(text).is_file() else _split_name(text)
        architecture, at, weights = model.rpartition("@")
        files = sorted(glob(weights)) if at and not Path(weights).exists() else []
        if name is not None and len(files) > 1:
            raise ValueError(f"one name, {name!r}, for {len(files)} files: leave it out to use those of the files")
        for spec in [f"{architecture}@{file}" for file in files] or [model]:
            own_name = default_name(spec) if name is None else name
            if own_name in named:
                raise ValueError(f"two models are called {own_name!r}: write NAME=MODEL, with a name for each")
            named[own_name] = spec
    return named


def _split_name(text: str) -> tuple[str | None, str]:
    """Split at the last "=" outside of parentheses and paths: lr=0.1(a)=small_cnn(seed=1)@run=3.pt."""
    depth, at = 0, None
    for k, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth and letter in "@:":
            break
        if not depth and letter == "=":
            at = k
    return (None, text) if at is None else (text[:at].strip(), text[at + 1 :])


def _safe(text: str) -> str:
    from ..report.words import visible

    return visible(text)


# `sosie zoo search | layers | map | …`: questions about the models of a zoo

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model of the zoo by name, a saved fingerprint, or any model.")
]
Kind = Annotated[str, typer.Option(help="cka, weights or atoms.")]
Count = Annotated[int, typer.Option("--count", "-k", min=1, help="How many.")]
Layers = Annotated[str | None, typer.Option(help="Layers of the model: names or globs, separated by commas.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use the short vectors alone.")]


def search(
    folder: opt.Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Layers = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Average best matches in both directions.")] = False,
    device: opt.Device = None, as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Find the models nearest to one."""
    result = open_zoo(folder).search(
        model, count, kind, site=opt.split(sites), tag=tag, architecture=architecture, task=task,
        exact=not quick, symmetric=symmetric, **opt.given(device=device),
    )  # fmt: skip
    opt.tell(result, out, html, as_json=as_json)


def layers(
    folder: opt.Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Layers = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False, device: opt.Device = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Find the layers of other models nearest to each layer of one."""
    result = open_zoo(folder).search(
        model, count, kind, "layer", site=opt.split(sites), tag=tag, architecture=architecture, task=task,
        exact=not quick, **opt.given(device=device),
    )  # fmt: skip
    opt.tell(result, out, html, as_json=as_json)


def map_(
    folder: opt.Folder, kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the landmarks of a large map.")] = 0,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Show all models as points in the plane, similar ones near each other."""
    result = open_zoo(folder).map(kind, tag=tag, architecture=architecture, task=task, seed=seed)
    opt.tell(result, out, html, as_json=as_json)


def clusters(
    folder: opt.Folder,
    count: Annotated[int | None, typer.Option("--count", "-k", min=1, help="How many; default: chosen.")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Find groups of similar models."""
    result = open_zoo(folder).clusters(count, kind, tag=tag, architecture=architecture, task=task)
    opt.tell(result, out, html, as_json=as_json)


def duplicates(
    folder: opt.Folder,
    threshold: Annotated[float | None, typer.Option(help="Similarity at every layer (1 - 1e-5).")] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Find models with the same weights, or alike at every layer."""
    result = open_zoo(folder).duplicates(
        kind=kind, tag=tag, architecture=architecture, task=task, **opt.given(threshold=threshold)
    )
    opt.tell(result, out, html, as_json=as_json)


def family(
    folder: opt.Folder, model: Model, count: Count = 5, device: opt.Device = None, as_json: opt.AsJson = False,
    out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Find the models that a model comes from, and those that come from it."""
    opt.tell(open_zoo(folder).family(model, count, **opt.given(device=device)), out, html, as_json=as_json)


def recommend(
    folder: opt.Folder,
    data: Annotated[str, typer.Option(help="Your data: demo, npz:file, folder:path, cifar10, file.py:factory …")],
    count: Count = 5,
    probe_layer: Annotated[
        str | None, typer.Option(help="Also a linear probe of this layer, by name or place (-2: the last but one).")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Sort by this score.")] = None,
    inputs: Annotated[int, typer.Option(min=4, help="Number of inputs to use.")] = 1000,
    trust: Annotated[bool, typer.Option("--trust", help="Run Python code that models were added from.")] = False,
    tag: Tag = None, architecture: Architecture = None, task: Task = None, device: opt.Device = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Rank models for your data by how much each would have to adapt, or by a quick probe."""
    layer = int(probe_layer) if probe_layer is not None and probe_layer.lstrip("-").isdigit() else probe_layer
    result = open_zoo(folder).recommend(
        data, count, probe_layer=layer, by=by, max_rows=inputs, trust=trust, tag=tag or None,
        architecture=architecture, task=task, **opt.given(device=device),
    )  # fmt: skip
    opt.tell(result, out, html, as_json=as_json)
    if not result.models:
        raise typer.Exit(1)


def index(folder: opt.Folder, kind: Kind = "cka") -> None:
    """Make an index for large zoos, or bring it up to date; needs faiss: pip install 'sosie[zoo]'."""
    result = open_zoo(folder).index(kind)
    typer.echo(
        f"{result['kind']}: {result['rows']:,} rows in {result['lists']:,} lists, {result['bytes'] / 2**20:,.1f} MiB"
    )


QUESTIONS: dict[str, Callable[..., None]] = {
    "search": search, "layers": layers, "map": map_, "clusters": clusters, "duplicates": duplicates, "family": family,
    "recommend": recommend, "index": index,
}  # fmt: skip
