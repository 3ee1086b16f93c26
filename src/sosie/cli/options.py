"""Shared by the verbs: options, comma-separated lists, how a result is written and shown, processes of torchrun."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

MODELS = (
    "Two models or more (tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, timm:…, hf:folder)"
)
Data = Annotated[
    str | None,
    typer.Option(help="demo, npz:file, folder:path, cifar10, cifar100, svhn, mnist, fashion-mnist, file.py:factory."),
]
Sites = Annotated[str | None, typer.Option(help="Sites of every model: names, globs, leaves, blocks.")]
SitesA = Annotated[str | None, typer.Option(help="Sites of the first model.")]
SitesB = Annotated[str | None, typer.Option(help="Sites of the second model.")]
Shape = Annotated[str | None, typer.Option(help="Shape of one input, e.g. 3x32x32; else the first layer is asked.")]
Rows = Annotated[str, typer.Option(help="flatten, mean, positions, cls or last.")]
MaxRows = Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")]
Batch = Annotated[int, typer.Option(min=1, help="Inputs per forward pass; does not change values.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Memory = Annotated[str | None, typer.Option(help="Most memory for what is kept of the models, e.g. 4GiB.")]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to look at.")]
Full = Annotated[bool, typer.Option("--full", help="Print every layer, and of several models every pair.")]
AsJson = Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")]
Folder = Annotated[Path, typer.Argument(metavar="ZOO", help="The folder of the zoo.")]


def split(text: str | None) -> list[str] | None:
    """Items of "a,b(k=1,l=2)": commas inside brackets do not separate; None stays None."""
    if text is None:
        return None
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    items.append(text[start:])
    found = [item.strip() for item in items if item.strip()]
    if not found:
        raise ValueError(f"an empty list: {text!r}")
    return found


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; others have the defaults of the function that they go to."""
    return {name: value for name, value in options.items() if value is not None}


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """3x32x32 as numbers."""
    if text is None:
        return None
    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}")
    return tuple(map(int, parts))


def parse_size(text: str) -> int | None:
    """Buckets of a sketch, or None for all rows."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise ValueError(f"--size is a whole number of buckets, or all, got {text!r}")
    return int(text)


def open_data(data: str | None, batch: int) -> Any:
    """The batches of the data that a text names; None stays None."""
    from .. import data as room

    return None if data is None else room.open_data(data, batch=batch)


def check_outputs(*paths: Path | None) -> None:
    """Raise if a file cannot be written, before the work is done."""
    from ..files import check_writable

    for path in paths:
        check_writable(path)


def tell(
    result: Any,
    out: Path | None = None,
    html: Path | None = None,
    *,
    plot: Path | None = None,
    full: bool = False,
    as_json: bool = False,
) -> None:
    """Write a result, then print it: a reader that goes away, as `| head` does, must not cost the files."""
    from ..report import write_plots, write_report

    written = [result.save(out)] if out is not None else []
    written += [write_report(result, html)] if html is not None else []
    written += write_plots(result, plot) if plot is not None else []
    if as_json:
        typer.echo(json.dumps(result.rows(), indent=2, ensure_ascii=False))
    else:
        _show(result, full)
    for path in written:
        typer.echo(f"wrote {path}", err=as_json)


def _show(found: Any, full: bool) -> None:
    """Print a result of any kind."""
    from ..report import print_answer, print_comparison, print_costs, print_dynamics, print_leaderboard
    from ..results import Answer, Costs, Dynamics, Leaderboard

    if isinstance(found, Costs):
        print_costs(found)
    elif isinstance(found, Leaderboard):
        print_leaderboard(found)
    elif isinstance(found, Answer):
        print_answer(found)
    elif isinstance(found, Dynamics):
        print_dynamics(found, full=full)
    else:
        print_comparison(found, full=full)


# Processes that torchrun started: they work together, and one of them speaks

STARTED_WITH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what every launcher of PyTorch's says
PATIENCE = timedelta(hours=24)  # for one that is slower; one that fails says so, and torchrun ends them all


@contextmanager
def working_together() -> Iterator[bool]:
    """True in the one process that writes and prints: the only one, or the first of several."""
    if any(name not in os.environ for name in STARTED_WITH) or int(os.environ["WORLD_SIZE"]) < 2:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def own_device(device: str | None) -> str | None:
    """The device, with each of several processes on one machine on a GPU of its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
