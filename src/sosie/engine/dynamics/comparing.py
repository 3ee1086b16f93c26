"""The door to dynamics: recorded runs or checkpoints in, site × time × time out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...capture import Rule
from ...measures import Measure, find
from ...process_state import products
from ...results import Caveat, Dynamics, Values
from ...stats import Atoms, LinearMaps, TensorPair
from ...train.run_folder import Run, chosen_sites, is_run, open_run
from ..plan import parse_size
from ..provenance import provenance
from .caveats import SORTED, of_coefficients, of_run
from .checkpoints import MAX_ROWS, Checkpoints, is_checkpoints, recorded
from .values import MEMORY, site_values

DEFAULTS = {"atoms": "atom_cosine", "weights": "weight_cosine", "activations": "debiased_cka"}


def dynamics(
    run: Any,
    other: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    data: Any = None,
    sites: Any = None,
    rows: Rule = "flatten",
    max_rows: int | None = None,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Dynamics:
    """How alike a network is at one time and at another, for each site: which layer settles when.

    `run`: a folder that `sosie.train.Recorder` wrote, a list of checkpoints, or {step: checkpoint}; a checkpoint is a
    model, a model specification, a state dict or a file of weights. `other`: a second such thing, for time of A × time
    of B at sites of the same name. `measures`: None takes atom_cosine of recorded atoms, weight_cosine of weights and
    debiased_cka of activations; other measures of the same kind of thing do too.

    Checkpoints with `data` are compared by their activations on the first `max_rows` inputs (1024 unless said
    otherwise; `rows`, `prepare` and `inputs` as for `compare`), one pass each; without data by their weights, or by
    their atoms if the measures are of atoms. What is read of them is kept in a temporary folder, or in `folder`, which
    is a recorded run then. `sites`: names and globs. `memory`: of what is held at a time ("2GiB").
    """
    chosen = _chosen(measures)
    budget = parse_size(memory) or MEMORY
    with ExitStack() as stack:
        options: dict[str, Any] = {"data": data, "rows": rows, "prepare": prepare, "inputs": inputs}
        if other is not None and folder is not None:
            raise ValueError("folder= keeps the checkpoints of one run; leave it out where there are two")
        runs: list[Run] = []
        weights: list[str] = []  # what is known of those of checkpoints
        for thing in (run,) if other is None else (run, other):
            if is_run(thing):
                if given := [
                    key
                    for key, value in options.items()
                    if value is not None and not (key == "rows" and value == "flatten")
                ]:
                    raise ValueError(f"{thing} is a recorded run: {given[0]}= was settled when it was recorded")
                runs.append(open_run(thing))
            elif is_checkpoints(thing):
                kind = _kind(chosen, data)
                checkpoints = Checkpoints(thing, kind, sites, device, max_rows or MAX_ROWS)
                run, told = recorded(checkpoints, stack, folder, **options)
                runs.append(run)
                weights += told
            else:
                raise TypeError(
                    f"dynamics takes the folder of a recorder (with a run.json), a list of checkpoints or {{step: "
                    f"checkpoint}}, got {_named(thing)}"
                )
        return _between(runs, chosen, sites, budget, data, weights)


def _chosen(measures: str | Measure | Sequence[str | Measure] | None) -> list[Measure] | None:
    if measures is None:
        return None
    found = [find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures)]
    if not found:
        raise ValueError("no measures asked for; `sosie measures` lists them")
    return found


def _kind(measures: list[Measure] | None, data: Any) -> str:
    """What of checkpoints is compared."""
    if measures is None:
        return "weights" if data is None else "activations"
    kinds = {_reads(measure) for measure in measures}
    if len(kinds) > 1:
        raise ValueError(f"{', '.join(m.name for m in measures)}: of {' and '.join(sorted(kinds))}; ask for them apart")
    kind = kinds.pop()
    if (kind == "activations") == (data is None):
        need = "are of activations: give data=" if data is None else f"are of {kind}: leave data out"
        raise ValueError(f"{', '.join(m.name for m in measures)} {need}")
    return kind


def _reads(measure: Measure) -> str:
    if issubclass(measure.reads, Atoms):
        return "atoms"
    if issubclass(measure.reads, TensorPair):
        return "weights"
    if issubclass(measure.reads, LinearMaps):
        raise ValueError(f"{measure.name}: of whole networks, not of what a run keeps; use compare_weights")
    if measure.reads_outputs:
        raise ValueError(f"{measure.name}: of what models answer; use compare_outputs")
    if "inputs" in measure.needs:
        raise ValueError(f"{measure.name} also needs the inputs, which a run does not keep; use compare")
    return "activations"


@products()
def _between(
    runs: list[Run], measures: list[Measure] | None, sites: Any, budget: int, data: Any, weights: list[str]
) -> Dynamics:
    a, b = runs[0], runs[-1]
    by_depth = all(each.about.by_depth for each in runs)
    names = _sites(a, b, sites)
    for each in runs:
        if not each.frames:
            raise ValueError(f"{each.folder} has no record yet")
    chosen = measures or [find(DEFAULTS[a.about.what])]
    for measure in chosen:
        if (kind := _reads(measure)) != a.about.what:
            raise ValueError(f"{measure.name} is of {kind}, and {a.name} is a record of {a.about.what}")
    known = [caveat for each in dict.fromkeys(runs) for caveat in of_run(each)]
    known += [] if by_depth else [Caveat(SORTED)]
    known += of_coefficients(a, b, names) if a.about.what == "atoms" else []
    values: dict[str, Values] = {}
    for measure in chosen:
        values[measure.name] = site_values(measure, a, b, names, budget, known)
    label = [each.name for each in (a, b)]
    models = [*(each.about.model for each in dict.fromkeys(runs)), *weights]
    settings = {"stored as": a.about.dtype, "rows": a.about.rows or "none"}
    return Dynamics(
        label[0] if len(runs) == 1 or label[0] != label[1] else f"{label[0]} (A)",
        label[1] if len(runs) == 1 or label[0] != label[1] else f"{label[1]} (B)",
        a.about.what,
        tuple(names),
        tuple(a.steps),
        tuple(b.steps),
        values,
        len(runs) == 2,
        provenance(settings=settings, models=models, data=data),
        by_depth,
    )


def _sites(a: Run, b: Run, sites: Any) -> list[str]:
    """Sites that both runs have; refused where they are not of one shape, or where the probes differ."""
    if a.about.what != b.about.what:
        raise ValueError(f"{a.name} is a record of {a.about.what}, {b.name} of {b.about.what}")
    if a.about.probe != b.about.probe:
        one, other = (each.about.probe or {} for each in (a, b))
        raise ValueError(
            f"{a.name} was probed with {one.get('inputs')} inputs ({str(one.get('digest'))[:8]}), {b.name} with "
            f"{other.get('inputs')} ({str(other.get('digest'))[:8]}): rows of other inputs cannot be paired"
        )
    found = [chosen_sites(each, sites) for each in (a, b)]
    if set(found[0]) != set(found[1]):
        alone = [[site for site in mine if site not in theirs] for mine, theirs in (found, found[::-1])]
        text = "; ".join(f"only {r.name} has {', '.join(own[:3])}" for r, own in zip((a, b), alone, strict=True) if own)
        raise ValueError(f"two runs are compared at sites of the same name, and {text}. sites= names common ones")
    for site in found[0]:
        shape_a, shape_b = a.shape(site), b.shape(site)
        if shape_a != shape_b and (a.about.what != "activations" or shape_a[0] != shape_b[0]):
            raise ValueError(f"site {site} is {shape_a} in {a.name} and {shape_b} in {b.name}")
    return found[0]


def _named(thing: Any) -> str:
    return repr(str(thing)) if isinstance(thing, (str, os.PathLike)) else type(thing).__name__
