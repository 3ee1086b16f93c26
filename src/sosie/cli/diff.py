"""`sosie diff`: is it still the same model, and if not, which layer is it?"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt

SAME, DIFFERENT, TROUBLE = 0, 1, 2  # exit statuses, as those of diff(1)


def diff(
    model_a: Annotated[
        str,
        opt.argument(
            opt.INPUTS,
            "A",
            "The reference: a model as for compare, a record (.safetensors), saved activations (.npz), or without "
            "--data a folder or file of weights; base=A gives it a name.",
        ),
    ],
    model_b: Annotated[str, opt.argument(opt.INPUTS, "B", "What should be the same.")],
    data: opt.Data = None,
    sites: opt.Sites = None,
    sites_a: opt.SitesA = None,
    sites_b: opt.SitesB = None,
    map: Annotated[
        list[str] | None,
        opt.option(
            opt.COMPARED,
            "PAIR",
            "a=b: a site of A and its counterpart, where names differ (repeat it); or a file of such lines.",
            "--map",
        ),
    ] = None,
    floor: Annotated[
        str,
        opt.option(
            opt.SURE,
            "FLOOR",
            "What must not matter: batch (another batch size, and rounding), bfloat16, float16, tf32, a relative error "
            "such as 1e-3, or a model that counts as the same as A.",
        ),
    ] = "batch",
    rtol: Annotated[
        float | None, opt.option(opt.SURE, "X", "Relative tolerance of the share of entries that do not match.")
    ] = None,
    atol: Annotated[float | None, opt.option(opt.SURE, "X", "Absolute tolerance of the same.")] = None,
    no_replay: Annotated[
        bool, opt.flag(opt.SURE, "--no-replay", "Do not run B's layers on A's inputs: less time, no guilty layer.")
    ] = False,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 32,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
    html: opt.Html = None,
    junit: Annotated[Path | None, opt.file("Write a test report as JUnit XML, for CI.", ("", ".xml"))] = None,
    as_json: opt.AsJson = False,
    full: Annotated[bool, opt.flag(opt.OUTPUT, "--full", "Print every site and tensor.")] = False,
) -> None:
    """Is it still the same model, and if not, which layer is it?

    $ sosie diff small_cnn@demo-a.safetensors small_cnn@demo-a.safetensors --data demo --max-rows 200
    $ sosie diff demo-a.safetensors demo-a.safetensors

    Exit status 0: the same; 1: different; 2: trouble. Without --data two folders or files of weights are compared
    tensor by tensor. `sosie record` writes what a model gives, to be held against later.
    """
    try:
        from ..diffing import diff as compare

        opt.check_outputs(out, html, junit)
        (first, second), names = opt.split_names([model_a, model_b])
        result = compare(
            first, second, opt.open_data(data, batch), names=names,
            sites=opt.split(sites), sites_a=opt.split(sites_a), sites_b=opt.split(sites_b), map=_map(map),
            floor=_floor(floor), rtol=rtol, atol=atol, replay=not no_replay, max_rows=max_rows,
            device=opt.own_device(device), memory=memory,
        )  # fmt: skip
    except Exception as error:
        error.exit_status = TROUBLE  # type: ignore[attr-defined]
        if junit is not None:
            from ..report import write_junit_error

            with suppress(OSError):  # the error may be that this file cannot be written
                write_junit_error(f"{model_a} and {model_b}", opt.message_of(error), junit)
        raise
    if junit is not None:
        from ..report import write_junit

        write_junit(result, junit)
    opt.tell(result, out, html, full=full, as_json=as_json)
    if junit is not None:
        typer.echo(f"wrote {junit}", err=as_json)
    raise typer.Exit(SAME if result.same else DIFFERENT)


def _floor(text: str) -> str | float:
    """A tolerance as a number, other floors as they are."""
    try:
        return float(text)
    except ValueError:
        return text


def _map(texts: list[str] | None) -> dict[str, str] | str | None:
    if not texts:
        return None
    if len(texts) == 1 and Path(texts[0]).is_file():
        return texts[0]
    if wrong := [text for text in texts if not all(part.strip() for part in text.partition("="))]:
        raise ValueError(f"--map is a=b, a site of A and one of B, or a file of such lines; got {wrong[0]!r}")
    return {a.strip(): b.strip() for a, _, b in (text.partition("=") for text in texts)}
