"""`sosie compare`: two models, or more, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from . import options as opt


def compare(
    models: Annotated[
        list[str],
        opt.argument(
            opt.INPUTS,
            "MODEL",
            f"{opt.MODELS}; also saved activations (.npz, .safetensors), sketches, or statistics to merge; "
            "base=MODEL gives one a name.",
        ),
    ],
    data: opt.Data = None,
    measures: Annotated[
        str | None, opt.measures("debiased_cka; for sketches linear_cka", "; options in brackets: mutual_knn(k=5)")
    ] = None,
    sites: opt.Sites = None,
    sites_a: opt.SitesA = None,
    sites_b: opt.SitesB = None,
    rows: opt.Rows = "flatten",
    rows_a: opt.RowsA = None,
    rows_b: opt.RowsB = None,
    max_rows: opt.MaxRows = None,
    batch: opt.Batch = 256,
    exact: Annotated[
        bool, opt.flag(opt.SURE, "--exact", "Use whole Gram matrices or covariances, not blocks.")
    ] = False,
    block: Annotated[int, opt.option(opt.SURE, "N", "Rows per block of Gram matrices.", min=4)] = 64,
    device: opt.Device = None,
    precision: Annotated[
        str | None, opt.option(opt.RUN, "PRECISION", "tf32, float32 or float64.", default="chosen for each statistic")
    ] = None,
    memory: opt.Memory = None,
    seed: Annotated[int, opt.option(opt.RUN, "N", "Seed of sampled rows and of models without weights.")] = 0,
    null: Annotated[str | None, opt.option(opt.SURE, "KIND", "permutation: also report chance and p-values.")] = None,
    draws: Annotated[int, opt.option(opt.SURE, "N", "Number of shuffles for p-values.", min=1)] = 200,
    interval: Annotated[bool, opt.flag(opt.SURE, "--interval", "A 95 % interval for every measure.")] = False,
    groups: Annotated[
        Path | None,
        opt.option(opt.INPUTS, "FILE", "A label per line and input: predictivity holds a group out together."),
    ] = None,
    kernel: Annotated[
        str | None,
        opt.option(opt.COMPARED, "NAME", "For sketches: hadamard, features, gradients, sum, maps, midpoint."),
    ] = None,
    unpaired: Annotated[bool, opt.flag(opt.COMPARED, "--unpaired", "Two sketches that share no rows.")] = False,
    resume: Annotated[
        Path | None, opt.option(opt.RUN, "FILE", "Save statistics here on the way; continue from them.")
    ] = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Which layers of models represent the same inputs alike?

    $ sosie compare small_cnn@demo-a.safetensors small_cnn@demo-b.safetensors --data demo --html c.html
    $ sosie compare "small_cnn(seed=0)" "small_cnn(seed=1)" --data demo --measures "mutual_knn(k=5)"
    """
    from .. import engine, sketching

    opt.check_outputs(out, html, resume)
    things: list[Any]
    models, names = opt.split_names(models)
    if unpaired or any(map(sketching.is_sketch, models)):
        if unpaired and len(models) != 2:
            raise ValueError(f"--unpaired compares two sketches, got {len(models)}")
        if others := [thing for thing in models if not sketching.is_sketch(thing)]:
            raise ValueError(
                f"sketches are only compared with sketches, not with {', '.join(others)}; `sosie sketch` makes one"
            )
        fixed: dict[str, Any] = {"--data": data, "--sites": sites, "--sites-a": sites_a, "--sites-b": sites_b}
        fixed |= {"--rows-a": rows_a, "--rows-b": rows_b}
        fixed |= {"--max-rows": max_rows, "--device": device, "--precision": precision, "--memory": memory}
        fixed |= {"--groups": groups, "--resume": resume, "--exact": exact or None, "--interval": interval or None}
        if wrong := opt.given(**fixed):
            raise ValueError(f"{', '.join(wrong)}: not for sketches, whose settings are fixed")
        loaded = [sketching.Sketch.load(path) for path in models]
        things = [sketch if kernel is None else sketch.using(kernel) for sketch in loaded]
    elif kernel is not None:
        raise ValueError(f"--kernel {kernel} applies to sketches only: `sosie sketch` makes one")
    else:
        things = [engine.open_source(text, seed=seed) for text in models]
    if unpaired:
        unpaired_values = sketching.compare_unpaired(
            *map(sketching.named, things, names or [None, None]), measures=opt.split(measures) or sketching.UNPAIRED,
            draws=draws if null is not None else None, seed=seed,
        )  # fmt: skip
        opt.tell(unpaired_values, out, html, full=full)
        return
    with opt.working_together() as speaks:
        comparison = engine.compare(
            things,
            opt.open_data(data, batch),
            measures=opt.split(measures), sites=opt.split(sites), sites_a=opt.split(sites_a),
            sites_b=opt.split(sites_b), rows=rows, rows_a=rows_a, rows_b=rows_b, names=names, max_rows=max_rows,
            exact=exact, block=block,
            device=opt.own_device(device), precision=precision, memory=memory, seed=seed, null=null, draws=draws,
            interval=interval, groups=None if groups is None else groups.read_text("utf-8").splitlines(), resume=resume,
        )  # fmt: skip
    if speaks:
        opt.tell(comparison, out, html, full=full)
