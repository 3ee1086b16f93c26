"""The door to sketching: a model and data in, one pass, a sketch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture import BETA, Loss, Rule, check_rule, predictive_of
from ...stats import Buckets, Sketch, check_seed, parts_of, plan_forms
from ..plan import MEMORY, parse_size
from ..provenance import provenance
from ..stream import Stream, rows_per_input
from .run import Run
from .source import read_through, source_of

SIZE = 512
KERNELS = ("features", "gradients", "hadamard")


def sketch(
    model: Any,
    data: Any,
    *,
    sites: Any = None,
    size: int | None = SIZE,
    seed: int = 0,
    kernels: str | Sequence[str] = KERNELS,
    rows: Rule = "flatten",
    output: str | Loss = "logits",
    beta: float = BETA,
    stack: int = 1,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    first_row: int = 0,
) -> Sketch:
    """Features and gradients of a model at every site, sketched to `size` rows in one forward and one backward pass.

    The gradient at a site is that of the loss expected under the model's own prediction tempered by `beta`, q ∝ p^β,
    so that no labels are needed. `output`: "logits", "gaussian" (the model answers a mean and a log-variance), or a
    function(answer, batch) → one loss an input. Gradients become rows by the same rule as features.

    `size`: buckets that rows are added up in with signs (CountSketch), `stack` of them on top of each other;
    None keeps every row, which is exact and grows with the data. `seed` and a row's index decide its bucket and
    sign: two models on the same data share them and can be compared with `sosie.compare`.
    `kernels`: what the sketch is to supply; see `sosie.compare(..., kernel=)`. Labels, where the batches have them,
    are sketched along, for `classify`. `memory`: the budget; sites too wide for it are projected, and say so.
    `first_row`: index of the first input where the data are one part of a larger set, to be merged.
    `sites`, `prepare`, `inputs`, `device`, `max_rows`: as in `sosie.compare`. The sketch stays on the device that the
    model ran on, where what is made of it is made; `sketch.to("cpu")` moves it.
    """
    check_rule(rows)
    if data is None:
        raise TypeError("a model is sketched on data: sketch(model, data)")
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels or ())
    parts = parts_of(names)
    if size is None and "hadamard" in parts:
        parts = (parts - {"hadamard"}) | {"features", "gradients"}  # the product itself is at hand
    buckets = None if size is None else Buckets(size, seed, stack)
    if size is None and stack != 1:
        raise ValueError(f"size=None keeps every row as it is, so that there is nothing to stack: got stack={stack}")
    check_seed(seed)
    if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 1):
        raise ValueError(f"max_rows must be a whole number, at least 1, got {max_rows}")
    if not isinstance(first_row, int) or not 0 <= first_row < 2**40:
        raise ValueError(f"first_row must be a whole number from 0 on, below 2^40, got {first_row}")
    source = source_of(
        model, sites, rows, prepare=prepare, inputs=inputs, device=device, predictive=predictive_of(output, beta)
    )
    with source.opened():
        stream = Stream.of(data, [source])
        side = source.look(stream.first)
        mixing = source.mixing(stream.first)
        each = rows_per_input([source])
        known = None if stream.total is None else min(stream.total, max_rows or stream.total)
        forms = plan_forms(
            side.widths,
            size,
            parts,
            seed=seed,
            memory=MEMORY if memory is None else parse_size(memory) or MEMORY,
            rows=None if known is None else known * each,
        )
        run = Run(source, side, forms, buckets, first_row * each)
        read_through(source, stream, run.take, task=f"sketching {source.name}", max_rows=max_rows)
        found = run.finish()
        digest = source.digest()
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    settings = {"size": size, "seed": seed, "stack": stack, "rows": rule, "device": str(device or "the model's own")}
    about = provenance(settings=settings, models=[source.describe()], data=data, mixing=mixing)
    return Sketch(
        side=side,
        size=size,
        seed=seed,
        stack=stack,
        rows_rule=rule,
        output=source.predictive.describe() if run.backwards else "none",
        model=digest,
        about={**about, "inputs": run.inputs},
        **found,
    )
