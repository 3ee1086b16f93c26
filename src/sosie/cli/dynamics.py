"""`sosie dynamics`: which layer settles when."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

from . import options as opt


def dynamics(
    runs: Annotated[
        list[str],
        opt.argument(
            opt.INPUTS,
            "RUN",
            "A folder that a recorder wrote, or two; or checkpoints in order of time: models as for compare, weights "
            'files, or a pattern, "hf:runs/checkpoint-*".',
        ),
    ],
    steps: Annotated[
        str | None,
        opt.option(
            opt.INPUTS,
            "STEPS",
            "For checkpoints: the step of each, e.g. 0,10,100.",
            default="0, 1, 2 …",
        ),
    ] = None,
    measures: Annotated[str | None, opt.measures("atom_cosine, weight_cosine or debiased_cka")] = None,
    data: Annotated[
        str | None,
        opt.option(opt.INPUTS, "DATA", "For checkpoints: compare activations on these data, as for compare."),
    ] = None,
    sites: opt.Sites = None,
    rows: opt.Rows = "flatten",
    max_rows: Annotated[
        int | None, opt.option(opt.INPUTS, "N", "Inputs for checkpoints.", default="1024", min=4)
    ] = None,
    batch: opt.Batch = 256,
    device: opt.Device = None,
    memory: opt.Memory = None,
    out: opt.Out = None,
    html: opt.Html = None,
    full: opt.Full = False,
) -> None:
    """Which layer settles when during training, and in which order?

    $ sosie dynamics "small_cnn(seed=0)" small_cnn@demo-a.safetensors --data demo --steps 0,10
    $ sosie dynamics "small_cnn(seed=0)" small_cnn@demo-a.safetensors --html d.html
    """
    from .. import history
    from ..history.run_folder import is_run

    opt.check_outputs(out, html)
    runs, names = opt.split_names(runs)
    runs = [spec for text in runs for spec in opt.matching(text)]
    recorded = [text for text in runs if is_run(text)]
    if recorded and len(recorded) < len(runs):
        other = next(text for text in runs if text not in recorded)
        raise ValueError(f"{recorded[0]} is a recorded run and {other} is not: name one or two runs, or checkpoints")
    if len(recorded) > 2:
        raise ValueError(f"name one run, or two to compare; got {len(recorded)}")
    if names is not None and not recorded:
        raise ValueError("checkpoints have steps, not names: --steps 0,10,100")
    if not recorded and len(runs) == 1 and not Path(runs[0]).exists():
        raise FileNotFoundError(f"no recorded run {runs[0]}: no such folder. Name two checkpoints or more")
    folders = [text for text in runs if Path(text).is_dir()]
    if not recorded and folders:
        hint = f"; a checkpoint of transformers is hf:{folders[0]}" if Path(folders[0], "config.json").is_file() else ""
        raise FileNotFoundError(f"{folders[0]} is not a recorded run: it has no run.json{hint}")
    if steps is not None and recorded:
        raise ValueError(f"--steps is for checkpoints; {recorded[0]} is a recorded run with its own steps")
    checkpoints = runs if steps is None else _at_steps(runs, steps)
    result = history.dynamics(
        recorded[0] if recorded else checkpoints, recorded[1] if len(recorded) == 2 else None,
        measures=opt.split(measures), data=opt.open_data(data, batch),
        names=names, sites=opt.split(sites), rows=rows, max_rows=max_rows, device=device, memory=memory,
    )  # fmt: skip
    opt.tell(result, out, html, full=full)


def _at_steps(checkpoints: list[str], steps: str) -> dict[int, str]:
    """Return the checkpoints by step."""
    words = opt.split(steps) or []
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--steps {steps}: whole numbers of at least 0, separated by commas")
    numbers = [int(word) for word in words]
    if len(numbers) != len(checkpoints):
        raise ValueError(f"--steps: give one for each checkpoint; got {len(numbers)} for {len(checkpoints)}")
    if any(first >= second for first, second in pairwise(numbers)):
        raise ValueError(f"--steps {steps}: steps must increase, since checkpoints are in order of time")
    return dict(zip(numbers, checkpoints, strict=True))
