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


HELP = """Which of many models are alike, and which should I fine-tune?

    $ sosie zoo init nets --data demo
    $ sosie zoo add nets a=small_cnn@demo-a.safetensors b=small_cnn@demo-b.safetensors
    $ sosie zoo search nets a

    A zoo is a folder of fingerprints of models, all made on the same inputs.
    """
Wait = Annotated[float, opt.option(opt.RUN, "SECONDS", "Seconds to wait for another writer.", min=0)]
Tag = Annotated[
    list[str] | None, opt.option(opt.WHICH, "TAG", "Only models with this tag; repeat it to require several.")
]
Architecture = Annotated[str | None, opt.option(opt.WHICH, "NAME", "Only models of this architecture.")]
Task = Annotated[str | None, opt.option(opt.WHICH, "NAME", "Only models trained for this task.")]


def init(
    folder: opt.Folder,
    data: Annotated[str, opt.option(opt.INPUTS, "DATA", "Inputs for all models: demo, npz:file, folder:path …")],
    max_rows: Annotated[int | None, opt.option(opt.INPUTS, "N", "Number of inputs.", default="256", min=4)] = None,
    size: Annotated[
        int | None, opt.option(opt.COMPARED, "N", "How many numbers a short vector has.", default="512")
    ] = None,
    seed: Annotated[int | None, opt.option(opt.RUN, "N", "Seed of the projection.", default="0", min=0)] = None,
    kinds: Annotated[str | None, opt.option(opt.COMPARED, "KINDS", "Some of cka,weights,atoms.", default="all")] = None,
    rows: Annotated[
        str | None,
        opt.option(opt.COMPARED, "RULE", "How activations become rows: flatten, mean, cls or last.", default="flatten"),
    ] = None,
    inputs: opt.Inputs = None,
) -> None:
    """Make a zoo, an empty folder for many models.

    $ sosie zoo init nets --data demo
    $ sosie zoo init images --data npz:images.npz --rows mean

    Its inputs and settings never change.
    """
    from ..zoo import Zoo

    if (folder / "zoo.sqlite").exists():
        raise FileExistsError(f"{folder} is a zoo already; `sosie zoo add {folder} MODEL` adds to it")
    made = Zoo(
        folder,
        data,
        max_rows=opt.renamed_inputs(inputs, max_rows),
        size=size,
        seed=seed,
        kinds=opt.split(kinds),
        rows=rows,
    )
    about = made.settings
    typer.echo(f"made {folder}: {about.n} inputs of hash {about.probe}, {', '.join(about.kinds)} of size {about.size}")


def add(
    folder: opt.Folder,
    models: Annotated[list[str], opt.argument(opt.INPUTS, "MODEL", "MODEL or NAME=MODEL; also a saved fingerprint.")],
    tag: Annotated[list[str] | None, opt.option(opt.ABOUT, "TAG", "A tag for all of them; may be repeated.")] = None,
    task: Annotated[str | None, opt.option(opt.ABOUT, "NAME", "The task they were trained for.")] = None,
    parent: Annotated[str | None, opt.option(opt.ABOUT, "NAME", "The model that they were fine-tuned from.")] = None,
    sites: opt.Sites = None,
    device: opt.Device = None,
    workers: Annotated[int, opt.option(opt.RUN, "N", "Processes that make fingerprints; 0: this one.", min=0)] = 0,
    dask: Annotated[
        str | None, opt.option(opt.RUN, "ADDRESS", "A Dask cluster to make them: tcp://host:8786, or its .json.")
    ] = None,
    replace: Annotated[bool, opt.flag(opt.OUTPUT, "--replace", "Replace models of the same names.")] = False,
    wait: Wait = 10.0,
) -> None:
    """Add models to a zoo.

    $ sosie zoo add nets a=small_cnn@demo-a.safetensors b=small_cnn@demo-b.safetensors
    $ sosie zoo add nets "small_cnn@demo-*.safetensors" --tag demo --replace

    Models that fail are recorded, and the others go on.
    """
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
    model: Annotated[str, opt.argument(opt.INPUTS, "MODEL", "A model, as for add.")],
    out: Annotated[Path, opt.file("The file to write, .safetensors.", opt.TENSORS)],
    sites: opt.Sites = None,
    device: opt.Device = None,
) -> None:
    """Write the fingerprint of a model without adding it.

    $ sosie zoo fingerprint nets small_cnn@demo-a.safetensors --out a.safetensors
    $ sosie zoo fingerprint nets "small_cnn(seed=1)" --sites "relu*" --out b.safetensors

    A fingerprint is there to search with, to look up in `sosie serve`, or to send.
    """
    result = open_zoo(folder).fingerprint(model, **opt.given(sites=opt.split(sites), device=device))
    path = result.save(out)
    typer.echo(f"wrote {path}: {', '.join(result.kinds)}, {path.stat().st_size / 2**20:,.1f} MiB")


def list_(
    folder: opt.Folder,
    tag: Tag = None,
    architecture: Architecture = None,
    task: Task = None,
    limit: Annotated[int | None, opt.option(opt.OUTPUT, "N", "List at most this many.", default="all", min=1)] = None,
    failed: Annotated[bool, opt.flag(opt.WHICH, "--failed", "Models that could not be added, and why.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Which models are in the zoo?

    $ sosie zoo list nets
    $ sosie zoo list nets --tag demo --json
    """
    from ..report import print_table
    from ..report.words import listed
    from ..zoo.listing import SHOWN, failures, models
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
        print_table(result.rows(), SHOWN)
        for note in dict.fromkeys(note for row in result for note in row["notes"]):
            names = [_safe(row["name"]) for row in result if note in row["notes"]]
            typer.echo(f"- {_safe(note)}: {listed(names, 'models')}")
    typer.echo(f"{len(result):,} failed" if failed else f"{len(result):,} of {_models(store.count())}")
    if not failed and store.count() and (why := store.why_none(filters)):
        typer.echo(_safe(why))


def remove(
    folder: opt.Folder,
    names: Annotated[list[str], opt.argument(opt.INPUTS, "NAME", "Models by name.")],
    wait: Wait = 10.0,
) -> None:
    """Remove models from a zoo, all that are named or none.

    $ sosie zoo remove nets a
    $ sosie zoo remove nets a b

    It also forgets models that failed. `sosie zoo compact` frees the space.
    """
    zoo = open_zoo(folder, wait)
    zoo.remove(*names)
    typer.echo(f"removed {len(names)}; {folder}: {_models(len(zoo))}")


def tag(
    folder: opt.Folder,
    name: Annotated[str, opt.argument(opt.INPUTS, "NAME", "A model by name.")],
    add: Annotated[list[str] | None, opt.option(opt.ABOUT, "TAG", "A tag to add; may be repeated.")] = None,
    drop: Annotated[list[str] | None, opt.option(opt.ABOUT, "TAG", "A tag to drop; may be repeated.")] = None,
    wait: Wait = 10.0,
) -> None:
    """Add tags to a model, or drop them.

    $ sosie zoo tag nets a --add clothes --add small
    $ sosie zoo tag nets a --drop demo
    """
    zoo = open_zoo(folder, wait)
    if not add and not drop:
        raise ValueError("name tags: --add TAG, --drop TAG")
    zoo.tag(name, add=add or (), drop=drop or ())
    typer.echo(f"{_safe(name)}: {', '.join(map(_safe, zoo[name].tags)) or 'no tags'}")


def check(
    folder: opt.Folder,
    repair: Annotated[bool, opt.flag(opt.RUN, "--repair", "Drop models that lost bytes, and report which.")] = False,
    data: Annotated[
        str | None, opt.option(opt.INPUTS, "DATA", "The data it was made with: restores a lost probe set.")
    ] = None,
    wait: Wait = 10.0,
) -> None:
    """Is every byte of the zoo still as it was written?

    $ sosie zoo check nets
    $ sosie zoo check nets --repair

    The exit status is 1 if something is lost and was not dropped.
    """
    result = open_zoo(folder, wait, data).check(repair=repair)
    for row in result.rows():
        typer.echo(f"- {_safe(row['text'])}")
    typer.echo(_safe(result.sentence()))
    if result.lost and not repair:
        typer.echo("--repair drops the models that lost bytes and keeps the rest")
    if result.left:
        raise typer.Exit(1)


def export(
    folder: opt.Folder,
    out: Annotated[
        Path,
        opt.argument(opt.OUTPUT, "FILE", "The file to write, .sosiezoo.", callback=opt.written_as((".sosiezoo",))),
    ],
) -> None:
    """Write the whole zoo as one file.

    $ sosie zoo export nets nets.sosiezoo
    $ sosie zoo export nets ../backup.sosiezoo
    """
    path = open_zoo(folder).export(out)
    typer.echo(f"wrote {path} ({path.stat().st_size / 2**20:,.1f} MiB)")


def import_(
    file: Annotated[Path, opt.argument(opt.INPUTS, "FILE", "A file that export wrote.")],
    folder: Annotated[Path, opt.argument(opt.OUTPUT, "ZOO", "A new folder.")],
) -> None:
    """Make a zoo from an exported file.

    $ sosie zoo import nets.sosiezoo copy
    $ sosie zoo import nets.sosiezoo zoos/nets

    A file that is inconsistent is refused.
    """
    from ..zoo import Zoo

    typer.echo(f"made {folder}: {_models(len(Zoo.import_(file, folder)))}")


def compact(folder: opt.Folder, wait: Wait = 10.0) -> None:
    """Free the space of removed models.

    $ sosie zoo compact nets
    $ sosie zoo compact nets --wait 60
    """
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
    """Return models by name: NAME=MODEL, MODEL by its own name, hf: or ARCHITECTURE@ with a pattern as all matches."""
    from ..zoo.tasks import default_name

    named: dict[str, str] = {}
    for text in models:
        name, model = (None, text) if Path(text).is_file() else _split_name(text)
        specs = opt.matching(model)
        if name is not None and len(specs) > 1:
            raise ValueError(f"one name, {name!r}, for {len(specs)} files: leave it out to use those of the files")
        for spec in specs:
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
    str, opt.argument(opt.INPUTS, "MODEL", "A model of the zoo by name, a saved fingerprint, or any model.")
]
Kind = Annotated[str, opt.option(opt.COMPARED, "KIND", "cka, weights or atoms.")]
Count = Annotated[int, opt.option(opt.OUTPUT, "N", "How many.", "--count", "-k", min=1)]
Layers = Annotated[
    str | None, opt.option(opt.COMPARED, "NAMES", "Layers of the model: names or globs, separated by commas.")
]
Quick = Annotated[bool, opt.flag(opt.RUN, "--quick", "Use the short vectors alone.")]


def search(
    folder: opt.Folder, model: Model, count: Count = 10, kind: Kind = "cka", sites: Layers = None, tag: Tag = None,
    architecture: Architecture = None, task: Task = None, quick: Quick = False,
    symmetric: Annotated[
        bool, opt.flag(opt.COMPARED, "--symmetric", "Average best matches in both directions.")
    ] = False,
    device: opt.Device = None, as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Which models are nearest to this one?

    $ sosie zoo search nets a
    $ sosie zoo search nets "small_cnn(seed=7)" --kind weights -k 3
    """
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
    """Which layers of other models are nearest to those of this one?

    $ sosie zoo layers nets a
    $ sosie zoo layers nets a --sites "relu*" -k 3
    """
    result = open_zoo(folder).search(
        model, count, kind, "layer", site=opt.split(sites), tag=tag, architecture=architecture, task=task,
        exact=not quick, **opt.given(device=device),
    )  # fmt: skip
    opt.tell(result, out, html, as_json=as_json)


def map_(
    folder: opt.Folder, kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of the landmarks of a large map.", min=0)] = 0,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Where do all models lie, with similar ones near each other?

    $ sosie zoo map nets --html map.html
    $ sosie zoo map nets --kind weights

    All models are points in the plane.
    """
    result = open_zoo(folder).map(kind, tag=tag, architecture=architecture, task=task, seed=seed)
    opt.tell(result, out, html, as_json=as_json)


def clusters(
    folder: opt.Folder,
    count: Annotated[
        int | None, opt.option(opt.COMPARED, "N", "How many groups.", "--count", "-k", default="chosen", min=1)
    ] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Which groups of similar models are there?

    $ sosie zoo clusters nets
    $ sosie zoo clusters nets -k 2 --out groups.json
    """
    result = open_zoo(folder).clusters(count, kind, tag=tag, architecture=architecture, task=task)
    opt.tell(result, out, html, as_json=as_json)


def duplicates(
    folder: opt.Folder,
    threshold: Annotated[
        float | None, opt.option(opt.COMPARED, "NUMBER", "Similarity at every layer.", default="1 - 1e-5")
    ] = None,
    kind: Kind = "cka", tag: Tag = None, architecture: Architecture = None, task: Task = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Which models have the same weights, or are alike at every layer?

    $ sosie zoo duplicates nets
    $ sosie zoo duplicates nets --threshold 0.95
    """
    result = open_zoo(folder).duplicates(
        kind=kind, tag=tag, architecture=architecture, task=task, **opt.given(threshold=threshold)
    )
    opt.tell(result, out, html, as_json=as_json)


def family(
    folder: opt.Folder, model: Model, count: Count = 5, device: opt.Device = None, as_json: opt.AsJson = False,
    out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Which models does this one come from, and which come from it?

    $ sosie zoo family nets a
    $ sosie zoo family nets small_cnn@demo-b.safetensors -k 3
    """
    opt.tell(open_zoo(folder).family(model, count, **opt.given(device=device)), out, html, as_json=as_json)


def recommend(
    folder: opt.Folder,
    data: Annotated[
        str, opt.option(opt.INPUTS, "DATA", "Your data: demo, npz:file, folder:path, cifar10, file.py:factory …")
    ],
    count: Count = 5,
    probe_layer: Annotated[
        str | None,
        opt.option(opt.COMPARED, "LAYER", "Also a linear probe of this layer, by name or place (-2: last but one)."),
    ] = None,
    by: Annotated[str | None, opt.option(opt.OUTPUT, "SCORE", "Sort by this score.")] = None,
    max_rows: Annotated[
        int | None, opt.option(opt.INPUTS, "N", "Number of inputs to use.", default="1000", min=4)
    ] = None,
    inputs: opt.Inputs = None,
    trust: Annotated[bool, opt.flag(opt.RUN, "--trust", "Run Python code that models were added from.")] = False,
    tag: Tag = None, architecture: Architecture = None, task: Task = None, device: opt.Device = None,
    as_json: opt.AsJson = False, out: opt.Out = None, html: opt.Html = None,
) -> None:  # fmt: skip
    """Which models should I fine-tune on my data?

    $ sosie zoo recommend nets --data demo
    $ sosie zoo recommend nets --data demo --probe-layer -2 -k 3

    Ranked by how much each would have to adapt, or by a quick probe.
    """
    layer = int(probe_layer) if probe_layer is not None and probe_layer.lstrip("-").isdigit() else probe_layer
    max_rows = opt.renamed_inputs(inputs, max_rows)
    result = open_zoo(folder).recommend(
        data, count, probe_layer=layer, by=by, max_rows=max_rows or 1000, trust=trust, tag=tag or None,
        architecture=architecture, task=task, **opt.given(device=device),
    )  # fmt: skip
    opt.tell(result, out, html, as_json=as_json)
    if not result.models:
        raise typer.Exit(1)


def index(folder: opt.Folder, kind: Kind = "cka") -> None:
    """Make an index for a large zoo, or bring it up to date.

    $ sosie zoo index nets
    $ sosie zoo index nets --kind weights

    An index is for 1,000 layers and more; it needs faiss: pip install 'sosie[zoo]'.
    """
    result = open_zoo(folder).index(kind)
    typer.echo(
        f"{result['kind']}: {result['rows']:,} rows in {result['lists']:,} lists, {result['bytes'] / 2**20:,.1f} MiB"
    )


QUESTIONS: dict[str, Callable[..., None]] = {
    "search": search, "layers": layers, "map": map_, "clusters": clusters, "duplicates": duplicates, "family": family,
    "recommend": recommend, "index": index,
}  # fmt: skip
