"""Shared by the verbs: options, comma-separated lists, writing and showing results, processes of torchrun."""

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
Shape = Annotated[str | None, typer.Option(help="Shape of one input, e.g. 3x32x32; default: from the first layer.")]
Rows = Annotated[str, typer.Option(help="flatten, mean, positions, cls or last.")]
MaxRows = Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")]
Batch = Annotated[int, typer.Option(min=1, help="Inputs per forward pass; does not change values.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Memory = Annotated[str | None, typer.Option(help="Memory limit for statistics of the models, e.g. 4GiB.")]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML page.")]
Full = Annotated[bool, typer.Option("--full", help="Print every layer, and every pair of several models.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Folder = Annotated[Path, typer.Argument(metavar="ZOO", help="The folder of the zoo.")]


def split(text: str | None) -> list[str] | None:
    """Split "a,b(k=1,l=2)" at commas outside of brackets; None stays None."""
    if text is None:
        return None
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    items.append(text[start:])
    items = [item.strip() for item in items if item.strip()]
    if not items:
        raise ValueError(f"an empty list: {text!r}")
    return items


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given, without those left at their default, None."""
    return {name: value for name, value in options.items() if value is not None}


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Return 3x32x32 as numbers."""
    if text is None:
        return None
    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"a shape looks like 3x32x32, got {text!r}")
    return tuple(map(int, parts))


def parse_size(text: str) -> int | None:
    """Return the buckets of a sketch; None for all rows."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise ValueError(f"--size is a whole number of buckets, or all, got {text!r}")
    return int(text)


def open_data(data: str | None, batch: int) -> Any:
    """Return the batches of named data; None stays None."""
    from .. import data as room

    return None if data is None else room.open_data(data, batch=batch)


def check_outputs(*paths: Path | None) -> None:
    """Raise before the work if a file cannot be written."""
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
    """Write a result before printing it: a reader that stops early, such as `| head`, must not cost the files."""
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


def _show(result: Any, full: bool) -> None:
    """Print a result of any kind."""
    from ..report import print_answer, print_comparison, print_costs, print_dynamics, print_leaderboard
    from ..results import Answer, Costs, Dynamics, Leaderboard

    if isinstance(result, Costs):
        print_costs(result)
    elif isinstance(result, Leaderboard):
        print_leaderboard(result)
    elif isinstance(result, Answer):
        print_answer(result)
    elif isinstance(result, Dynamics):
        print_dynamics(result, full=full)
    else:
        print_comparison(result, full=full)


# Processes of torchrun: they work together, and one of them writes and prints

STARTED_WITH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by every launcher of PyTorch
PATIENCE = timedelta(hours=24)  # for a slower process; if one fails, torchrun ends them all


@contextmanager
def working_together() -> Iterator[bool]:
    """Yield True in the process that writes and prints: the only one, or the first of several."""
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
    """Return the device: "cuda" gives each of several processes on one machine its own GPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
