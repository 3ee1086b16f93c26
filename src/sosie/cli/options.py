"""Shared by the verbs: options, comma-separated lists, writing and showing results, processes of torchrun."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import typer

GROUPS = INPUTS, COMPARED, EVERY, WHICH, ABOUT, SURE, RUN, OUTPUT = (
    *("Inputs", "What is compared", "With --all-sites", "Which models of the zoo", "About the models"),
    *("How sure", "How it runs", "Output"),
)  # of options in `--help`, in this order


def argument(group: str, metavar: str, help: str, default: str | bool = True, **more: Any) -> Any:
    """An argument of a group; `default` says what is used if none is given and the signature has only None."""
    return typer.Argument(metavar=metavar, help=help, show_default=default, rich_help_panel=group, **more)


def option(group: str, metavar: str, help: str, *names: str, default: str | bool = True, **more: Any) -> Any:
    """An option of a group with a value; `names` if they are not those of the parameter, `more` min, max, callback."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=default, rich_help_panel=group, **more)


def flag(group: str, name: str, help: str) -> Any:
    """An option of a group without a value."""
    return typer.Option(name, help=help, rich_help_panel=group)


def measures(default: str, more: str = "") -> Any:
    """The option --measures, and what is used without it."""
    return option(COMPARED, "NAMES", f"Measures, separated by commas{more}.", default=default)


def seed(of: str, default: str | bool = True) -> Any:
    """The option --seed of whatever is random."""
    return option(RUN, "N", f"Seed of {of}.", default=default, min=0)


MODELS = (
    "Two models or more: tiny10@weights.safetensors, file.py:factory@weights, torchvision:resnet18, timm:…, hf:folder, "
    "hf:org/name"
)
DATA = (
    "What to run on: demo, npz:file, folder:path, texts:file, datasets:name, cifar10, cifar100, svhn, mnist, "
    "fashion-mnist, file.py:factory."
)
ROWS = "How activations become rows: flatten, mean, positions, grid(4), cls or last."
Data = Annotated[str | None, option(INPUTS, "DATA", DATA)]
MaxRows = Annotated[int | None, option(INPUTS, "N", "Stop after this many inputs.", default="all", min=1)]
Shape = Annotated[
    str | None, option(INPUTS, "SHAPE", "Shape of one input, e.g. 3x32x32.", default="from the first layer")
]
Sites = Annotated[str | None, option(COMPARED, "NAMES", "Sites of every model: names, globs, leaves, blocks.")]
SitesA = Annotated[str | None, option(COMPARED, "NAMES", "Sites of the first model.")]
SitesB = Annotated[str | None, option(COMPARED, "NAMES", "Sites of the second model.")]
Rows = Annotated[str, option(COMPARED, "RULE", ROWS)]
RowsA = Annotated[str | None, option(COMPARED, "RULE", "Rows of the first model, where they differ.")]
RowsB = Annotated[str | None, option(COMPARED, "RULE", "Rows of the second model, where they differ.")]
SketchRows = Annotated[str | None, option(COMPARED, "RULE", ROWS, default="flatten")]
Size = Annotated[str | None, option(SURE, "N", "Number of buckets, or all: every row, which is exact.", default="512")]
Beta = Annotated[float | None, option(COMPARED, "NUMBER", "Tempers the predictions for gradients.", default="0.5")]
Output = Annotated[str | None, option(COMPARED, "KIND", "Output of the model: logits or gaussian.", default="logits")]
Inputs = Annotated[int | None, typer.Option(hidden=True)]  # the name that --max-rows had before
Batch = Annotated[int, option(RUN, "N", "Inputs per forward pass; does not change values.", min=1)]
Device = Annotated[str | None, option(RUN, "DEVICE", "Compute on cpu, cuda, cuda:1 …", default="the model's")]
Memory = Annotated[str | None, option(RUN, "SIZE", "Memory limit for statistics of the models, e.g. 4GiB.")]


WRITES = {".json": "--out", ".html": "--html", ".htm": "--html", ".csv": "a button of the page (--html)"}
WRITES |= dict.fromkeys((".svg", ".png", ".pdf"), "sosie report FILE.json --plot, or a button of the page")
JSON, PAGE, TENSORS = ("", ".json"), ("", ".html", ".htm"), (".safetensors",)  # endings; "": none


def written_as(endings: Sequence[str]) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """What raises, before the verb runs, if the file to write does not end in one of these."""

    def check(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None or (ending := path.suffix.lower()) in endings:
            return path
        own = " or ".join(filter(None, endings))
        name = next((name for name in parameter.opts if name.startswith("-")), "the file")
        hint = f"; files that end in {ending} are written by {WRITES[ending]}" if ending in WRITES else ""
        error = ValueError(f"{name} {path}: this is written as {own}{hint}")
        error.exit_status = 2  # type: ignore[attr-defined]  # as of typer's own errors, and of `diff` in trouble
        raise error

    return check


def file(help: str, endings: Sequence[str], *names: str) -> Any:
    """An option of a file to write, with one of these endings."""
    return option(OUTPUT, "FILE", help, *names, callback=written_as(endings))


Out = Annotated[Path | None, file("Write the result as JSON.", JSON)]
Html = Annotated[Path | None, file("Write an HTML page.", PAGE)]
Full = Annotated[bool, flag(OUTPUT, "--full", "Print every layer, and every pair of several models.")]
AsJson = Annotated[bool, flag(OUTPUT, "--json", "Print everything as JSON.")]
Folder = Annotated[Path, argument(INPUTS, "ZOO", "The folder of the zoo.")]


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


def split_names(models: list[str]) -> tuple[list[str], list[str | None] | None]:
    """The models of "base=tiny10@a.safetensors", and their names: what stands before the first =, if that can be one.

    A part of a path or a specification is not a name: lr=0.1/a.npz if there is such a file, ./lr=0.1/a.npz if not,
    tiny10(seed=1), tiny10@lr=1.safetensors.
    """
    parts = [re.fullmatch(r"([^/\\.@:(=]+)=(.+)", text) if not Path(text).exists() else None for text in models]
    names = [part and part[1].strip() for part in parts]
    specs = [part[2] if part else text for part, text in zip(parts, models, strict=True)]
    return specs, names if any(names) else None


def matching(model: str) -> list[str]:
    """The models that "hf:runs/checkpoint-*" or "resnet20@runs/*.safetensors" stands for; others stand for themselves.

    Numbers in names count as numbers: checkpoint-900 is before checkpoint-1000.
    """
    architecture, at, pattern = model.partition(":") if model.startswith("hf:") else model.rpartition("@")
    if not at or Path(pattern).exists():
        return [model]
    found = [path for path in glob(pattern) if at == "@" or Path(path).is_dir()]
    found.sort(key=lambda path: [part.zfill(20) for part in re.split(r"(\d+)", path)])
    return [f"{architecture}{at}{path}" for path in found] or [model]


def renamed_inputs(inputs: int | None, max_rows: int | None) -> int | None:
    """The value of --max-rows, which was --inputs."""
    if inputs is None:
        return max_rows
    if max_rows is not None:
        raise ValueError("--inputs is called --max-rows now: give it once")
    typer.echo("note: --inputs is called --max-rows now; the next version knows only that", err=True)
    return inputs


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
    from ..report import print_result, write_plots, write_report

    written = [result.save(out)] if out is not None else []
    written += [write_report(result, html)] if html is not None else []
    written += write_plots(result, plot) if plot is not None else []
    if as_json:
        typer.echo(json.dumps(result.rows(), indent=2, ensure_ascii=False))
    else:
        print_result(result, full=full)
    for path in written:
        typer.echo(f"wrote {path}", err=as_json)


def message_of(error: Exception) -> str:
    """Return the message, with its type if the message alone is not clear."""
    plain = isinstance(error, (ValueError, TypeError, OSError, ImportError, MemoryError)) or not error.args
    # str() of a KeyError is the repr of its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    hint = "" if plain else "\n  (SOSIE_DEBUG=1 shows the traceback)"
    name = "" if plain and text else f"{type(error).__name__}: "
    return f"{name}{text}{notes}{hint}"


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
