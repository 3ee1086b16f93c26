"""The door to dynamics: recorded runs or checkpoints in, site × time × time out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import Rule
from ..engine.caveats import of_left_out
from ..engine.pairs import CONSTANT, by_pair
from ..engine.plan import parse_size
from ..engine.provenance import provenance
from ..files import DamagedFile
from ..linalg import u_centred
from ..measures import Measure, find, snap_to_bounds
from ..process_state import products
from ..progress import track
from ..results import Caveat, Dynamics, Estimate, Side
from ..stats import Alignment, Atoms, DebiasedAlignment, LinearMaps, Sample, TensorPair, UncentredAlignment
from .checkpoints import MAX_ROWS, Checkpoints, is_checkpoints, recorded
from .run_folder import Run, chosen_sites, differ, is_run, open_run

# Doubts about dynamics, in words

SHOWN = 6  # steps that are named
SORTED = (
    "safetensors files keep layers by name, not in order of depth: name the model as well (file.py:factory@weights) to "
    "have them in order"
)


def of_run(run: Run) -> Iterator[Caveat]:
    if run.note is not None:
        yield Caveat(f"{run.name}: {run.note}")
    yield from of_left_out(Side(run.name, (), (), (), left_out=tuple(run.about.left_out.items())))


def of_coefficients(a: Run, b: Run, sites: Sequence[str]) -> list[Caveat]:
    """Atoms belong to each other only as far as the coefficients stay the same."""
    found = []
    for run in dict.fromkeys((a, b)):
        moved = [site for site in run.coefficients_moved() if site in sites]
        text = (
            f"{run.name}: the coefficients were trained as well, so the atoms tell of a part of the change only; "
            "freeze(model, 'coefficients') keeps them"
        )
        found += [Caveat(text, site) for site in moved]
    if a is not b:
        ours, theirs = (run.coefficient_sums()[-1:, [run.sites.index(site) for site in sites]] for run in (a, b))
        text = f"{a.name} and {b.name} have other coefficients: atom i of one is not atom i of the other"
        found += [Caveat(text, site) for site, other in zip(sites, differ(ours, theirs), strict=True) if other]
    return found


def of_states(run: Run, site: str, undefined: Mapping[int, str]) -> Iterator[Caveat]:
    """States without a value, those of one reason together."""
    for reason in dict.fromkeys(undefined.values()):
        steps = [run.steps[k] for k, why in undefined.items() if why == reason]
        more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
        plural = "s" * (len(steps) > 1)
        yield Caveat(f"{run.name}, step{plural} {', '.join(map(str, steps[:SHOWN]))}{more}: {reason}", site)


def of_widths(measure: Measure, runs: Sequence[Run], site: str) -> Iterator[Caveat]:
    """Too few rows for the width."""
    for run in dict.fromkeys(runs):
        n, width = run.shape(site)
        if measure.few_rows is not None and n <= width:
            effects = {"biased": f"biased {measure.closer}", "infinite": "values are infinite"}
            effect = effects.get(measure.few_rows, "values saturate")
            yield Caveat(f"n={n} rows for a width of {width}: {effect}", site)


# Every time against every other at each site: one product for all pairs where the maths allows

MEMORY = 2**31  # bytes of states that are held at a time
NOTHING_LEFT = 1e-12  # share of ‖K‖² that is rounding, once its diagonal is taken off

Combine = Callable[[list[Any], list[Any], bool], Tensor]


class _Undefined(ValueError):
    """A state that has no value with anything, and why."""


def site_values(
    measure: Measure, a: Run, b: Run, sites: Sequence[str], budget: int, known: Sequence[Caveat]
) -> Estimate:
    """One measure at all sites; a site that it cannot be computed at is NaN, with the reason."""
    found = np.full((len(sites), len(a.frames), len(b.frames)), np.nan)
    caveats, refused = list(known), []
    for k, site in enumerate(track(sites, measure.name, len(sites), "sites")):
        try:
            value, doubts = _at_site(measure, a, b, site, budget)
        except DamagedFile:
            raise
        except (ValueError, ImportError, torch.linalg.LinAlgError) as error:
            refused.append(error)
            caveats.append(Caveat(f"undefined: {error}", site))
            continue
        found[k] = snap_to_bounds(value, measure).numpy()
        caveats += doubts
    if len(refused) == len(sites):
        raise ValueError(f"{measure.name} is undefined at every site; {sites[0]}: {refused[0]}") from refused[0]
    what, shape = a.about.what, a.shape(sites[0])
    low, high = (None if bound is None else float(bound) for bound in measure.bounds)
    return Estimate(
        found,
        n=shape[0] if what == "activations" else sum(math.prod(a.shape(site)) for site in sites),
        statistic=f"all {shape[0]} rows" if what == "activations" else f"the {what} themselves",
        closer=measure.closer,
        bounds=(low, high),
        same=None if measure.same is None else float(measure.same),
        caveats=tuple(caveats),
    )


def _at_site(measure: Measure, a: Run, b: Run, site: str, budget: int) -> tuple[Tensor, list[Caveat]]:
    shapes = a.shape(site), b.shape(site)
    size = 8 * max(map(math.prod, shapes))
    prepare: Callable[[Tensor], Any]
    if issubclass(measure.reads, Atoms):
        prepare, combine = _atoms, _of_atoms(measure)
    elif measure.base == "weight_cosine":
        prepare, combine = _direction, _products
    elif issubclass(measure.reads, TensorPair):
        prepare, combine = _tensor, _of_tensors(measure)
    elif issubclass(measure.reads, Alignment):
        prepare, combine, size = _gram(measure.reads), _of_grams(measure), 8 * shapes[0][0] ** 2
    else:
        prepare, combine = _rows, _of_rows(measure)
    found, undefined = _tiled(a, b, site, prepare, combine, max(1, budget // (2 * size)), measure.symmetric)
    doubts = [caveat for run, why in zip((a, b), undefined, strict=True) for caveat in of_states(run, site, why)]
    if a.about.what == "activations":
        doubts += of_widths(measure, (a, b), site)
    return found, list(dict.fromkeys(doubts))


def _tiled(
    a: Run, b: Run, site: str, prepare: Callable[[Tensor], Any], combine: Combine, count: int, symmetric: bool
) -> tuple[Tensor, tuple[dict[int, str], dict[int, str]]]:
    """All pairs of states, `count` states of each side held at a time; and why some states have no value."""
    found = torch.full((len(a.frames), len(b.frames)), torch.nan, dtype=torch.float64)
    undefined: tuple[dict[int, str], dict[int, str]] = ({}, {})
    mirrored = a is b and symmetric

    def read(run: Run, states: range, why: dict[int, str]) -> dict[int, Any]:
        kept = {}
        for k in states:
            try:
                kept[k] = prepare(run.tensor(k, site))
            except _Undefined as error:
                why[k] = str(error)
        return kept

    for rows in _ranges(len(a.frames), count):
        left = read(a, rows, undefined[0])
        for columns in _ranges(len(b.frames), count):
            if mirrored and columns.start < rows.start:
                continue
            same = a is b and columns.start == rows.start
            right = left if same else read(b, columns, undefined[1])
            if left and right:
                part = combine(list(left.values()), list(right.values()), mirrored and same)
                found[np.ix_(list(left), list(right))] = part.double().cpu()
    if mirrored:
        found = torch.triu(found) + torch.triu(found, 1).T
    return found, ({**undefined[0], **undefined[1]}, {}) if a is b else undefined


def _ranges(total: int, count: int) -> Iterator[range]:
    for start in range(0, total, count):
        yield range(start, min(start + count, total))


# What is made of one state


def _tensor(given: Tensor) -> Tensor:
    found = given.double()
    if bad := int((~torch.isfinite(found)).sum()):
        raise _Undefined(f"{bad} of {found.numel()} numbers are NaN or infinite")
    return found


def _atoms(given: Tensor) -> Tensor:
    found = _tensor(given).flatten(1)
    if not bool(found.any()):
        raise _Undefined("all atoms are 0: they have no direction")
    return found


def _direction(given: Tensor) -> Tensor:
    found = _tensor(given).flatten()
    norm = found.norm()
    if not float(norm):
        raise _Undefined("all weights are 0: they have no direction")
    return found / norm


def _rows(given: Tensor) -> Tensor:
    found = _tensor(given)
    _centred(found)
    return found


def _centred(rows: Tensor) -> Tensor:
    found = rows - rows.mean(0, keepdim=True)
    if not float(found.square().sum()) > CONSTANT["float64"] * float(rows.square().sum()):
        raise _Undefined("features do not vary: no similarity is defined")
    return found


def _gram(kind: type[Alignment]) -> Callable[[Tensor], Tensor]:
    def make(given: Tensor) -> Tensor:
        rows = _tensor(given)
        centred = _centred(rows)
        used = rows if kind is UncentredAlignment else centred
        gram = used @ used.T
        if kind is not DebiasedAlignment:
            return gram.flatten()
        hollow = u_centred(gram)
        if not float(hollow.square().sum()) > NOTHING_LEFT * float(gram.square().sum()):
            raise _Undefined("all rows are equally far apart: nothing is left once the diagonal is taken off")
        return hollow.flatten()

    return make


# All pairs of two lots of states; `once` asks for those on and above the diagonal only


def _products(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
    x = torch.stack(left)
    return x @ (x if left is right else torch.stack(right)).T


def _of_atoms(measure: Measure) -> Combine:
    return lambda left, right, once: measure(Atoms(torch.stack(left), torch.stack(right)))


def _of_grams(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        xx, yy = (torch.stack([gram @ gram for gram in side]) for side in (left, right))
        return measure(measure.reads(xx[:, None], yy[None, :], _products(left, right, once)))

    return combine


def _of_tensors(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        kept: dict[int, Tensor] = {}  # spectra of single states
        found = torch.full((len(left), len(right)), torch.nan, dtype=torch.float64)
        for i, x in enumerate(track(left, measure.name, len(left), "states")):
            for j, y in enumerate(right):
                if i <= j or not once:
                    found[i, j] = measure(TensorPair(x, y, kept))
        return found

    return combine


def _of_rows(measure: Measure) -> Combine:
    def combine(left: list[Tensor], right: list[Tensor], once: bool) -> Tensor:
        everywhere = [np.ones(len(side), dtype=bool) for side in (left, right)]
        widths = tuple(rows.shape[1] for rows in left), tuple(rows.shape[1] for rows in right)
        found = by_pair([measure], Sample.of(left, right), widths, *everywhere, once=once)[measure.name]
        if found.undefined:
            raise ValueError(next(iter(found.undefined.values())))
        return found.matrix((len(left), len(right)))

    return combine


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

    `run`: a folder that `sosie.history.Recorder` wrote, a list of checkpoints, or {step: checkpoint}; a checkpoint is a
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
    values: dict[str, Estimate] = {}
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
