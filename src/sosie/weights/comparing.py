"""The door to comparing weights: models in, no data, a result of the same kind as for layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.network import number_duplicates
from ..engine.plan import MEMORY, draws_of, parse_size
from ..engine.provenance import provenance
from ..measures import MEASURES, Measure, find
from ..process_state import products
from ..results import TENSORS, Array, Comparison, Comparisons, LazyComparisons, at_layers, layers
from ..stats import Atoms, LinearMaps
from .atoms import POLAR, AtomComparison, AtomOptions, Joint, open_atoms
from .maps import BLOCK, FEWEST, PROBES, WeightSource, check_weights, open_weights
from .measuring import Plan, measure_all

DEFAULT = "wcka"


@products()  # a forward is how weights are read here, and the caller's autocast is not for it
def compare_weights(
    model_a: Any,
    model_b: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    sites_a: Any = None,
    sites_b: Any = None,
    match: str | None = None,
    joint: Joint = None,
    base: Any = None,
    input_shape: Sequence[int] | None = None,
    probes: int | None = None,
    null: str | None = None,
    draws: int = 20,
    seed: int = 0,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
) -> Comparison | Comparisons:
    """Compare what models are made of, without data: the network up to each layer, and from end to end.

    `model_a`, `model_b`: modules or model specifications; a list, or {name: model}, gives all pairs. `measures`: None
    takes wcka. `sites_a`, `sites_b`: names, globs, types; None takes each layer that holds weights, and "output", the
    whole network. With activation functions taken away a network is a linear map of its input, and so is its beginning
    up to any site: convolutions, batch norm, residual sums and mean pooling are, max pooling is taken for mean pooling,
    and whatever else is not linear (attention, layer norm) is an error that names it.

    `input_shape`: of one input; None asks the first layer: as many numbers as a dense one takes, 28 × 28 for grey
    images, 224 × 224 where a convolution strides, else 32 × 32, or the first size that fits. Each entry of the input is
    tried where that fits into `memory`; else, or if `probes` says how many, Gaussian inputs (seeded by `seed`) estimate
    the same, with an interval.

    `null="weights"`: what chance gives, as the mean over `draws` copies of B whose weights are shuffled within each
    tensor, with p-values. For inputs without a layout (dense first layers) the mean over shuffled entries of the input
    comes along free. `match="weights"`: B's neurons are first put into the order that fits A's best. `base`: for
    measures of tensors and atoms, a model that all started from; what is compared is how far they moved.

    Measures of atoms are for models that share their coefficients (to 1e-6 of their norm), layer by layer; "all" is the
    mean over layers. `joint=m`: models that share nothing are decomposed together first, m atoms a layer on common
    coefficients. `joint="polar"`: convolutions of any number of channels, by the factor (WᵀW)^½ of their kernels, with
    what shuffled weights give; these do not depend on the order of neurons, so that `match` concerns what is asked
    beside them. Asked beside them, `weight_cosine` reads the whole weights.
    """
    things, names = _things(model_a, model_b)
    chosen = _chosen(measures)
    of_tensors = [m.name for m in chosen if not issubclass(m.reads, LinearMaps)]
    if of_tensors and len(of_tensors) < len(chosen):
        of_maps = ", ".join(m.name for m in chosen if m.name not in of_tensors)
        raise ValueError(
            f"{', '.join(of_tensors)}: of single tensors; {of_maps}: of networks up to a layer; ask for them apart"
        )
    _check_options(of_tensors, base=base, null=None if joint else null, probes=probes)
    of_atoms = tuple(measure for measure in chosen if measure.reads is Atoms)
    _check_joint(joint, chosen, match, base)
    if len(things) > 2 and sites_b is not None:
        raise ValueError("with more than two models, sites_a is for all of them; leave sites_b out")
    if match not in (None, "weights"):
        raise ValueError(f"match={match!r}: None, or 'weights'")
    sites = [sites_a, sites_a if len(things) > 2 else sites_b, *[sites_a] * (len(things) - 2)]
    sources = [open_weights(*each, device) for each in zip(things, names, sites, strict=True)]
    number_duplicates(sources)
    for source in sources:
        check_weights(source)
    settings = {"seed": str(seed), "device": str(device or "each model's own")} | ({"match": match} if match else {})
    about = provenance(settings=settings, models=[source.describe() for source in sources])
    matching = {"seed": seed, "input_shape": input_shape}
    if of_tensors:
        started = None if base is None else open_weights(base, None, None, None).model
        # What polar factors give by chance is far from 0, so it is always told.
        drawn = draws_of("weights" if joint == POLAR else null, draws, "weights")
        options = AtomOptions(joint, started, match is not None, input_shape, drawn, seed)
        atoms = open_atoms(sources, of_atoms, options) if of_atoms else None
        return _of_tensors(sources, chosen, about, atoms, base=started, match=match, **(matching if match else {}))
    size = parse_size(memory)
    plan = Plan(
        chosen,
        input_shape,
        _probes(probes),
        draws_of(null, draws, "weights"),
        seed,
        MEMORY if size is None else size,
        match is not None,
    )
    found, value = measure_all(sources, plan, about)
    if len(sources) == 2:
        return found(0, 1)
    pairs = list(itertools.combinations(range(len(sources)), 2))
    return Comparisons(tuple(source.name for source in sources), LazyComparisons(pairs, found, value))


def _things(model_a: Any, model_b: Any) -> tuple[list[Any], list[str | None]]:
    """What is compared, and its names where they are given."""
    tensors = isinstance(model_a, Mapping) and any(isinstance(value, Tensor) for value in model_a.values())
    several = isinstance(model_a, (list, tuple, Mapping)) and not isinstance(model_a, nn.Module) and not tensors
    if not several:
        if model_b is None:
            raise TypeError("compare_weights needs two models, or a list of them")
        return [model_a, model_b], [None, None]
    if model_b is not None:
        raise TypeError("with several models there is no second one: compare_weights([m1, m2, m3])")
    things = list(model_a.values()) if isinstance(model_a, Mapping) else list(model_a)
    if len(things) < 2:
        raise ValueError(f"need at least two models to compare, got {len(things)}")
    return things, list(map(str, model_a)) if isinstance(model_a, Mapping) else [None] * len(things)


def _chosen(measures: str | Measure | Sequence[str | Measure] | None) -> tuple[Measure, ...]:
    if measures is None:
        measures = DEFAULT
    found = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
    known = ", ".join(measure.name for measure in MEASURES.values() if measure.reads_weights)
    if not found:
        raise ValueError(f"no measures asked for; of weights there are {known}")
    if others := [measure.name for measure in found if not measure.reads_weights]:
        raise ValueError(f"{', '.join(others)}: not of weights; there are {known}, and compare takes data")
    return found


def _check_options(of_tensors: Sequence[str], **given: Any) -> None:
    """Refuse what the measures asked for would not look at."""
    base = given.pop("base")
    if base is not None and not of_tensors:
        raise ValueError("base= is for measures of tensors, not for wcka")
    if unread := [f"{name}=" for name, value in given.items() if value is not None and of_tensors]:
        raise ValueError(f"{unread[0]} is for wcka and wcka_uncentred, not for {', '.join(of_tensors)}")


def _probes(probes: int | None) -> int | None:
    if probes is None:
        return None
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < FEWEST:
        raise ValueError(
            f"probes={probes!r}: a whole number of at least {FEWEST}, as {PROBES}; more narrow the interval"
        )
    return -(-probes // BLOCK) * BLOCK


def _check_joint(joint: Joint, measures: Sequence[Measure], match: str | None, base: Any) -> None:
    of_atoms = [measure for measure in measures if measure.reads is Atoms]
    names = ", ".join(measure.name for measure in of_atoms)
    if joint is None:
        if of_atoms and match is not None:
            raise ValueError(f"match= with {names} is for joint=m: models that share coefficients are in one order")
        return
    if joint != POLAR and (isinstance(joint, bool) or not isinstance(joint, int) or joint < 1):
        raise ValueError(f"joint={joint!r}: a number of atoms, or 'polar'")
    if not of_atoms:
        raise ValueError("joint= is for atom_cosine and atom_grassmann: name one as a measure")
    if joint == POLAR:
        if others := [measure.name for measure in of_atoms if measure.base != "atom_cosine"]:
            raise ValueError(f"joint='polar' has as many atoms as entries, for which {', '.join(others)} is always 1")
        if base is not None:
            raise ValueError("joint='polar' does not go with base=: what a factor moved by depends on all of a layer")
        if match is not None and len(of_atoms) == len(measures):
            raise ValueError(
                "joint='polar' does not depend on the order of neurons, so match= has nothing to do: leave it out "
                "(weight_cosine, asked beside it, is matched)"
            )


def _of_tensors(
    sources: list[WeightSource],
    measures: tuple[Measure, ...],
    about: dict[str, Any],
    atoms: AtomComparison | None,
    **options: Any,
) -> Comparison | Comparisons:
    """Measures that read one tensor, or one layer's atoms, of each model at a time."""
    from .tensors import tensor_values

    plain = [measure for measure in measures if measure.reads is not Atoms]
    sites = [source.sites for source in sources] if atoms is None else [side.sites for side in atoms.sides]

    def found(i: int, j: int) -> Comparison:
        names = sources[i].name, sources[j].name
        values = {} if atoms is None else atoms.values(i, j)
        side_a, side_b = (None, None) if atoms is None else (atoms.sides[i].side, atoms.sides[j].side)
        if plain:
            models = sources[i].model, sources[j].model
            side_a, side_b, more = tensor_values(
                *models, plain, sites_a=sites[i], sites_b=sites[j], names=names, **options
            )
            values |= more
        assert side_a is not None
        assert side_b is not None
        asked = [measure.name for measure in measures]
        ordered = sorted(values, key=lambda name: asked.index(name) if name in asked else len(asked))
        return Comparison(side_a, side_b, {name: values[name] for name in ordered}, TENSORS, about, kind="weights")

    if len(sources) == 2:
        return found(0, 1)

    def value(i: int, j: int, name: str) -> Array:
        own = atoms is not None and name in {measure.name for measure in atoms.measures}
        if atoms is None or not own:
            return at_layers(found(i, j), name).value
        return atoms.value(i, j, name)[np.ix_(layers(atoms.sides[i].sites), layers(atoms.sides[j].sites))]

    pairs = list(itertools.combinations(range(len(sources)), 2))
    whole = None if atoms is None else atoms.whole
    return Comparisons(tuple(source.name for source in sources), LazyComparisons(pairs, found, value, whole))
