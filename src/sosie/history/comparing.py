"""Dynamics: recorded runs or checkpoints in, site × time × time out."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import Rule, as_found
from ..checks import listed, whole_number
from ..engine.caveats import of_left_out
from ..engine.evaluate import CONSTANT, by_pair
from ..engine.network import names_of
from ..engine.plan import parse_size
from ..engine.provenance import provenance
from ..files import DamagedFile
from ..linalg import u_centred
from ..measures import Measure, find, find_all, snap_to_bounds
from ..models import NamedModel, open_model, read_weights, weights_of, with_name
from ..models.weights import is_state_dict, masked_weights
from ..process_state import products
from ..progress import track
from ..results import Caveat, Dynamics, Estimate, Side
from ..stats import Alignment, Atoms, DebiasedAlignment, LinearMaps, Sample, TensorPair, UncentredAlignment
from .recorder import Recorder, RunInputs
from .run_folder import Run, choose_sites, differ, is_run, open_run

DEFAULTS = {"atoms": "atom_cosine", "weights": "weight_cosine", "activations": "debiased_cka"}
MAX_ROWS = 1024  # inputs that checkpoints are probed with by default
MEMORY = 2**31  # bytes of states in memory at a time
SORTED = (
    "safetensors files store layers by name, not in order of depth: name the model too (file.py:factory@weights) to "
    "have them in order"
)


def dynamics(
    run: Any,
    other: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    names: Sequence[str | None] | None = None,
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
    """Compare a network at each time with itself at every other, for each site: which layer settles when?

    `run`: a folder that `sosie.history.Recorder` wrote, a list of checkpoints, or {step: checkpoint}; a checkpoint is a
    model, a model specification, a state dict or a file of weights. `other`: a second run, for time of A × time of B at
    sites of the same name; `names`, or {name: run}, gives runs names. `measures`: None takes atom_cosine of recorded
    atoms, weight_cosine of weights and debiased_cka of activations; other measures of the same kind are possible.

    Checkpoints with `data` are compared by their activations on the first `max_rows` inputs (1024 by default; `rows`,
    `prepare` and `inputs` as for `compare`), one pass each; without data by their weights, or by their atoms if the
    measures read atoms. Their states are kept in a temporary folder, or in `folder`, which then is a recorded run.
    `sites`: names and globs. `memory`: the budget for states in memory ("2GiB").
    """
    chosen = None if measures is None else find_all(measures)
    if other is not None and folder is not None:
        raise ValueError("folder= stores the checkpoints of one run: leave it out for two")
    if isinstance(run, Mapping) and run and all(isinstance(key, str) for key in run) and not is_state_dict(run):
        if other is not None:
            raise TypeError("named runs are one argument, a dict: dynamics({'wide': run_a, 'narrow': run_b})")
        if len(run) > 2:
            raise ValueError(f"one run, or two against each other; got {len(run)}: {listed(run)}")
        things, all_names = names_of(run, names)
    else:
        things, all_names = names_of([run] if other is None else [run, other], names)
    options: dict[str, Any] = {"data": data, "rows": rows, "prepare": prepare, "inputs": inputs}
    runs: list[Run] = []
    weights: list[str] = []  # the origin of the checkpoints' weights
    with ExitStack() as stack:
        for thing in things:
            if is_run(thing):
                stated = {**options, "rows": None if rows == "flatten" else rows}
                if settled := [key for key, value in stated.items() if value is not None]:
                    raise ValueError(f"{thing} is a recorded run: {settled[0]}= was decided when it was recorded")
                runs.append(open_run(thing))
            elif isinstance(thing, (list, tuple, Mapping)) and not is_state_dict(thing):
                place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "checkpoints"
                probing = options | {"max_rows": max_rows or MAX_ROWS}
                weights += _record(thing, _kind(chosen, data), place, sites, device, probing)
                runs.append(open_run(place))
            else:
                got = repr(str(thing)) if isinstance(thing, (str, os.PathLike)) else type(thing).__name__
                raise TypeError(
                    "dynamics takes the folder of a recorder (with a run.json), a list of checkpoints or {step: "
                    f"checkpoint}}, got {got}"
                )
        return _compare(runs, all_names, chosen, sites, parse_size(memory) or MEMORY, data, weights)


def _kind(measures: list[Measure] | None, data: Any) -> str:
    """The kind of thing of checkpoints that is compared: atoms, weights or activations."""
    if measures is None:
        return "weights" if data is None else "activations"
    kinds = {_reads(measure) for measure in measures}
    if len(kinds) > 1:
        names = ", ".join(measure.name for measure in measures)
        raise ValueError(f"{names} compare {' and '.join(sorted(kinds))}: use separate calls")
    kind = kinds.pop()
    if (kind == "activations") == (data is None):
        need = "give data=" if data is None else "leave data out"
        raise ValueError(f"{', '.join(m.name for m in measures)} compare {kind}: {need}")
    return kind


def _reads(measure: Measure) -> str:
    if issubclass(measure.reads, Atoms):
        return "atoms"
    if issubclass(measure.reads, TensorPair):
        return "weights"
    if issubclass(measure.reads, LinearMaps):
        raise ValueError(f"{measure.name} compares whole networks, which a run does not store; use compare_weights")
    if measure.reads_outputs:
        raise ValueError(f"{measure.name} compares outputs; use compare_outputs")
    if "inputs" in measure.needs:
        raise ValueError(f"{measure.name} also needs the inputs, which a run does not store; use compare")
    return "activations"


# Checkpoints as a recorded run: read one after the other, storing only what is compared


def _record(
    checkpoints: Any, kind: str, folder: str | os.PathLike[str], sites: Any, device: Any, options: dict[str, Any]
) -> list[str]:
    """Record all checkpoints in a folder; returns the origin of their weights, in words."""
    steps = dict(checkpoints) if isinstance(checkpoints, Mapping) else dict(enumerate(checkpoints))
    for step in steps:
        whole_number(step, "the step of a checkpoint", least=0)
    if len(steps) < 2:
        raise ValueError(f"need at least two checkpoints to see a change, got {len(steps)}")
    # Safetensors files are sorted by name: without a model, the order of depth is not known.
    by_depth = not any(_is_file_of_weights(thing, kind, ".safetensors") for thing in steps.values())
    probe: RunInputs | None = None
    origins = []
    for step in track(sorted(steps), "checkpoints", len(steps), ""):
        thing = steps[step]
        name = str(thing) if isinstance(thing, (str, os.PathLike)) else str(step)
        name = thing.name if isinstance(thing, NamedModel) else name
        try:
            model, prepare, weights = _open(thing, kind, options["prepare"])
            origins += [f"{name}: step {step}, {weights}"] if weights else []
            if kind == "activations" and probe is None:
                probe = RunInputs(**{**options, "prepare": prepare})
            elif probe is not None:
                probe.prepare = prepare
            with ExitStack() as stack:
                if isinstance(model, nn.Module):
                    stack.enter_context(as_found(model, device))
                recorder = Recorder(folder, model, kind, sites=sites, data=probe, by_depth=by_depth)  # type: ignore[arg-type]
                stack.enter_context(recorder).record(step)
        except Exception as error:
            error.add_note(f"while reading checkpoint {name} (step {step})")
            raise
    return origins


def _is_file_of_weights(thing: Any, kind: str, suffix: str = "") -> bool:
    """Whether a checkpoint is a file of weights without a model, of this suffix if one is given."""
    if kind == "activations" or not isinstance(thing, (str, os.PathLike)):
        return False
    path = Path(thing)
    return path.is_file() and path.suffix != ".py" and path.suffix.endswith(suffix)


def _open(thing: Any, kind: str, prepare: Any) -> tuple[Any, Any, str]:
    """Open a checkpoint: a model or a state dict, its `prepare`, and the origin of its weights."""
    if _is_file_of_weights(thing, kind):
        return masked_weights(read_weights(thing)[0]), None, ""
    if isinstance(thing, (str, os.PathLike)):
        thing = open_model(str(thing))
    if is_state_dict(thing):
        if kind == "activations":
            raise TypeError("a state dict cannot be run on data: give models or specifications like small_cnn@file")
        return thing, None, ""
    model, _, prepare = with_name(thing, prepare)
    if not isinstance(model, nn.Module):
        raise TypeError(f"a checkpoint is a model, a specification, a state dict or a file, got {type(model).__name__}")
    return model, prepare, weights_of(thing)


# Runs against each other


@products(one_core=True)
def _compare(
    runs: list[Run],
    names: Sequence[str | None],
    measures: list[Measure] | None,
    sites: Any,
    budget: int,
    data: Any,
    weights: list[str],
) -> Dynamics:
    a, b = runs[0], runs[-1]
    both = list(dict.fromkeys(runs))
    what, by_depth = a.about.what, all(run.about.by_depth for run in both)
    common = _common_sites(a, b, sites)
    for run in both:
        if not run.frames:
            raise ValueError(f"{run.folder} has no record yet")
    chosen = measures or [find(DEFAULTS[what])]
    for measure in chosen:
        if (kind := _reads(measure)) != what:
            raise ValueError(f"{measure.name} compares {kind}, but {a.name} is a record of {what}")
    caveats: list[Caveat] = []
    for run in both:
        caveats += [] if run.note is None else [Caveat(f"{run.name}: {run.note}")]
        caveats += of_left_out(Side(run.name, (), (), (), left_out=tuple(run.about.left_out.items())))
    caveats += [] if by_depth else [Caveat(SORTED)]
    caveats += _of_coefficients(a, b, common) if what == "atoms" else []
    labels = [name or run.name for name, run in zip((names[0], names[-1]), (a, b), strict=True)]
    if len(runs) == 2 and labels[0] == labels[1]:
        labels = [f"{labels[0]} (A)", f"{labels[1]} (B)"]
    settings = {"stored as": a.about.dtype, "rows": a.about.rows or "none"}
    return Dynamics(
        labels[0],
        labels[1],
        what,
        tuple(common),
        tuple(a.steps),
        tuple(b.steps),
        {measure.name: _at_sites(measure, a, b, common, budget, caveats) for measure in chosen},
        len(runs) == 2,
        provenance(settings=settings, models=[*(run.about.model for run in both), *weights], data=data),
        by_depth,
    )


def _common_sites(a: Run, b: Run, sites: Any) -> list[str]:
    """The sites that both runs have; raises if their shapes or the probes differ."""
    if a.about.what != b.about.what:
        raise ValueError(f"{a.name} is a record of {a.about.what}, {b.name} of {b.about.what}")
    if a.about.probe != b.about.probe:
        probe_a, probe_b = (run.about.probe or {} for run in (a, b))
        raise ValueError(
            f"{a.name} was probed with {probe_a.get('inputs')} inputs ({str(probe_a.get('digest'))[:8]}), {b.name} "
            f"with {probe_b.get('inputs')} ({str(probe_b.get('digest'))[:8]}): rows of other inputs cannot be paired"
        )
    sites_a, sites_b = (choose_sites(run.sites, sites, f"site recorded in {run.folder}") for run in (a, b))
    alone = [(a, [s for s in sites_a if s not in sites_b]), (b, [s for s in sites_b if s not in sites_a])]
    if text := "; ".join(f"only {run.name} has {listed(names)}" for run, names in alone if names):
        raise ValueError(f"two runs are compared at sites of the same name, but {text}. sites= names common ones")
    for site in sites_a:
        shape_a, shape_b = a.shape(site), b.shape(site)
        if shape_a != shape_b and (a.about.what != "activations" or shape_a[0] != shape_b[0]):
            raise ValueError(f"site {site} is {shape_a} in {a.name} and {shape_b} in {b.name}")
    return sites_a


def _of_coefficients(a: Run, b: Run, sites: Sequence[str]) -> Iterator[Caveat]:
    """Caveats about coefficients that differ: atoms correspond only as long as the coefficients stay the same."""
    for run in dict.fromkeys((a, b)):
        text = (
            f"{run.name}: the coefficients were trained too, so the atoms show only a part of the change; "
            "freeze(model, 'coefficients') keeps them fixed"
        )
        yield from (Caveat(text, site) for site in run.coefficients_moved() if site in sites)
    if a is not b:
        sums_a, sums_b = (run.coefficient_sums()[-1:, [run.sites.index(site) for site in sites]] for run in (a, b))
        text = f"{a.name} and {b.name} have different coefficients: atom i of one is not atom i of the other"
        yield from (Caveat(text, site) for site, differs in zip(sites, differ(sums_a, sums_b), strict=True) if differs)


# Every time against every other at each site: one product for all pairs if the measure allows it

NOTHING_LEFT = 1e-12  # share of ‖K‖² that is rounding, once its diagonal is removed


def _at_sites(measure: Measure, a: Run, b: Run, sites: Sequence[str], budget: int, known: Sequence[Caveat]) -> Estimate:
    """One measure at all sites; NaN with the reason for a site at which it cannot be computed."""
    values = np.full((len(sites), len(a.frames), len(b.frames)), np.nan)
    caveats, errors = list(known), []
    for k, site in enumerate(track(sites, measure.name, len(sites), "sites")):
        try:
            value, more = _at_site(measure, a, b, site, budget)
        except DamagedFile:
            raise
        except (ValueError, ImportError, torch.linalg.LinAlgError) as error:
            errors.append(error)
            caveats.append(Caveat(f"undefined: {error}", site, undefined=True))
            continue
        values[k] = snap_to_bounds(value, measure).numpy()
        caveats += more
    if len(errors) == len(sites):
        raise ValueError(f"{measure.name} is undefined at every site; {sites[0]}: {errors[0]}") from errors[0]
    what, shape = a.about.what, a.shape(sites[0])
    n, statistic = shape[0], f"all {shape[0]} rows"
    if what != "activations":
        n, statistic = sum(math.prod(a.shape(site)) for site in sites), f"the {what} themselves"
    return Estimate.of(measure, values, n=n, statistic=statistic, caveats=caveats)


def _at_site(measure: Measure, a: Run, b: Run, site: str, budget: int) -> tuple[Tensor, list[Caveat]]:
    """All times of A against all times of B at one site, and the caveats of these values."""
    n = a.shape(site)[0]
    entries = n**2 if issubclass(measure.reads, Alignment) else max(math.prod(run.shape(site)) for run in (a, b))
    count = max(1, budget // (2 * 8 * entries))  # states of each side in memory at a time
    undefined: dict[Run, dict[int, str]] = {a: {}, b: {}}

    def read(run: Run, start: int) -> dict[int, Tensor]:
        states = {}
        for k in range(start, min(start + count, len(run.frames))):
            state = _state(measure, run.tensor(k, site))
            if isinstance(state, str):
                undefined[run][k] = state
            else:
                states[k] = state
        return states

    values = torch.full((len(a.frames), len(b.frames)), torch.nan, dtype=torch.float64)
    mirrored = a is b and measure.symmetric
    for i in range(0, len(a.frames), count):
        left = read(a, i)
        for j in range(i if mirrored else 0, len(b.frames), count):
            right = left if a is b and i == j else read(b, j)
            if left and right:
                part = _all_pairs(measure, left, right, once=mirrored and i == j)
                values[np.ix_(list(left), list(right))] = part.double().cpu()
    if mirrored:
        values = torch.triu(values) + torch.triu(values, 1).T
    caveats = []
    for run, reasons in undefined.items():
        for reason in dict.fromkeys(reasons.values()):
            steps = [run.steps[k] for k, why in reasons.items() if why == reason]
            text = f"{run.name}, step{'s' * (len(steps) > 1)} {listed(steps, 6)}: {reason}"
            caveats.append(Caveat(text, site))
    if a.about.what == "activations" and measure.few_rows is not None:
        effects = {"biased": f"biased {measure.closer}", "infinite": "values are infinite"}
        effect = effects.get(measure.few_rows, "values saturate")
        widths = dict.fromkeys(run.shape(site)[1] for run in (a, b))
        caveats += [Caveat(f"n={n} rows for a width of {w}: {effect}", site) for w in widths if n <= w]
    return values, caveats


def _way(measure: Measure) -> Literal["atoms", "cosines", "tensors", "grams", "rows"]:
    """How a measure compares two states: all but tensors and rows by one product for all pairs."""
    if issubclass(measure.reads, Atoms):
        return "atoms"
    if issubclass(measure.reads, TensorPair):
        return "cosines" if measure.base == "weight_cosine" else "tensors"
    return "grams" if issubclass(measure.reads, Alignment) else "rows"


def _state(measure: Measure, state: Tensor) -> Tensor | str:
    """What a measure reads of one state, in float64; or the reason why the state cannot be compared."""
    way, state = _way(measure), state.double()
    if bad := int((~torch.isfinite(state)).sum()):
        return f"{bad} of {state.numel()} numbers are NaN or infinite"
    if way in ("atoms", "cosines") and not bool(state.any()):
        return f"all {'atoms' if way == 'atoms' else 'weights'} are 0: they have no direction"
    if way == "atoms":
        return state.flatten(1)
    if way == "cosines":
        return state.flatten() / state.norm()
    if way == "tensors":
        return state
    centred = state - state.mean(0, keepdim=True)
    if not float(centred.square().sum()) > CONSTANT["float64"] * float(state.square().sum()):
        return "features do not vary: no similarity is defined"
    if way == "rows":
        return state
    rows = state if measure.reads is UncentredAlignment else centred
    gram = rows @ rows.T
    if measure.reads is not DebiasedAlignment:
        return gram.flatten()
    hollow = u_centred(gram)
    if not float(hollow.square().sum()) > NOTHING_LEFT * float(gram.square().sum()):
        return "all rows are equally far apart: nothing is left once the diagonal is removed"
    return hollow.flatten()


def _all_pairs(measure: Measure, left: Mapping[int, Tensor], right: Mapping[int, Tensor], *, once: bool) -> Tensor:
    """All pairs of states; `once`: only those on and above the diagonal, if pairs are compared one by one."""
    way, xs, ys = _way(measure), list(left.values()), list(right.values())
    if way == "tensors":
        spectra: dict[int, Tensor] = {}  # of single states
        values = torch.full((len(xs), len(ys)), torch.nan, dtype=torch.float64)
        for i, x in enumerate(track(xs, measure.name, len(xs), "states")):
            for j, y in enumerate(ys):
                if i <= j or not once:
                    values[i, j] = measure(TensorPair(x, y, spectra))
        return values
    if way == "rows":
        everywhere = [np.ones(len(side), dtype=bool) for side in (xs, ys)]
        widths = tuple(rows.shape[1] for rows in xs), tuple(rows.shape[1] for rows in ys)
        pairs = by_pair([measure], Sample.of(xs, ys), widths, *everywhere, once=once)[measure.name]
        if pairs.undefined:
            raise ValueError(next(iter(pairs.undefined.values())))
        return pairs.matrix((len(xs), len(ys)))
    x = torch.stack(xs)
    y = x if left is right else torch.stack(ys)
    if way == "atoms":
        return measure(Atoms(x, y))
    if way == "cosines":
        return x @ y.T
    xx, yy = (torch.stack([gram @ gram for gram in side]) for side in (xs, ys))
    view: Any = measure.reads
    return measure(view(xx[:, None], yy[None, :], x @ y.T))
