"""Compare the weights of models, without data; the result is a `Comparison`, as for layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..capture import NotLinear
from ..checks import one_of, whole_number
from ..engine.network import Network, for_each, models_and_data, number_duplicates
from ..engine.plan import MEMORY, draws_of, find_measures, parse_size
from ..engine.provenance import describe_model, provenance
from ..measures import Measure
from ..models.weights import is_state_dict
from ..process_state import products
from ..results import TENSORS, Array, Caveat, Comparison, Comparisons, LazyComparisons, at_layers, layers
from ..stats import Atoms, LinearMaps
from .atoms import POLAR, AtomComparison, Joint, open_atoms
from .maps import BLOCK, FEWEST, PROBES, check_weights, compare_maps
from .tensors import tensor_values

DEFAULT = "wcka"
INSTEAD = "weight_cosine"  # by default, for models that are not linear maps, such as transformers
NO_STATE_DICT = "; a state dict does not say how its tensors are connected: load it into a model"


@products()  # weights are read by a forward, which the caller's autocast must not change
def compare_weights(
    model_a: Any,
    model_b: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    names: Sequence[str | None] | None = None,
    sites: Any = None,
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
    """Compare the weights of models, without data: the network up to each layer, and from end to end.

    `model_a`, `model_b`: modules or model specifications; a list, or {name: model}, gives all pairs, and `names` names.
    `measures`: None takes wcka, or weight_cosine for a model that is not a linear map, such as a transformer.
    `sites`, or `sites_a` and `sites_b` for each: names, globs, types; None takes each layer that holds weights, and
    "output", the whole network. Without its activation functions a network is a linear map of its input, and so is the
    part up to any site: convolutions, batch norm, residual sums and mean pooling are linear, max pooling is replaced by
    mean pooling, and any other nonlinear operation (attention, layer norm) is an error that names it.

    `input_shape`: of one input. None reads it from the first layer: the width of a dense layer, 28 × 28 for grey
    images, 224 × 224 if a convolution strides, otherwise 32 × 32, or the first size that fits. Each entry of the input
    is tried if that fits into `memory`; otherwise, or if `probes` sets their number, Gaussian inputs (seeded by `seed`)
    give an estimate with an interval.

    `null="weights"`: the value at chance, as the mean over `draws` copies of B whose weights are shuffled within each
    tensor, with p-values. For inputs without a layout (dense first layers) the mean over shuffled entries of the input
    is always given. `match="weights"`: B's neurons are first put into the order that fits A's best. `base`: for
    measures of tensors and atoms, a model that all started from; the differences to it are compared.

    Measures of atoms are for models that share their coefficients (to 1e-6 of their norm), layer by layer; "all" is the
    mean over layers. `joint=m`: models that share nothing are first decomposed together, into m atoms per layer on
    common coefficients. `joint="polar"`: convolutions of any number of channels, by the factor (WᵀW)^½ of their
    kernels, with the value of shuffled weights as chance; polar factors do not depend on the order of neurons, so
    `match` applies only to other measures. `weight_cosine` always reads the whole weights.
    """
    if isinstance(model_a, (list, tuple, Mapping)) and model_b is not None and not is_state_dict(model_a):
        raise TypeError("several models are one argument, a list: compare_weights([m1, m2, m3])")
    if model_b is None and not isinstance(model_a, (list, tuple, Mapping)):
        raise TypeError("compare_weights needs two models, or a list of them")
    models, names, _ = models_and_data(model_a, model_b, None, names)
    chosen = find_measures(DEFAULT if measures is None else measures, of="weights")
    of_tensors = any(not issubclass(measure.reads, LinearMaps) for measure in chosen)
    _check_options(chosen, joint=joint, match=match, base=base, null=null, probes=probes)
    if probes is not None:
        why = f"{PROBES} are usual, and more give a narrower interval"
        probes = -(-whole_number(probes, "probes", least=FEWEST, why=why) // BLOCK) * BLOCK
    all_sites = for_each("sites", len(models), sites_a, sites_b, sites)
    networks = [
        Network.of(model, name=name, otherwise=NO_STATE_DICT, sites=chosen_sites, device=device)
        for model, name, chosen_sites in zip(models, names, all_sites, strict=True)
    ]
    number_duplicates(networks)
    for network in networks:
        check_weights(network)
    settings = {"seed": str(seed), "device": str(device or "each model's own")} | ({"match": match} if match else {})
    described = [describe_model(n.model, n.name, n.weights, known_as=n.known_as) for n in networks]
    about = provenance(settings=settings, models=described)
    # Polar factors of unrelated layers are far from 0, so their value at chance is always measured.
    draws = draws_of("weights" if joint == POLAR else null, draws, "weights")
    how: dict[str, Any] = {"seed": seed, "input_shape": input_shape}
    atoms = None
    if of_tensors:
        start = None if base is None else Network.of(base, otherwise=NO_STATE_DICT).model
        if of_atoms := [measure for measure in chosen if measure.reads is Atoms]:
            atoms = open_atoms(networks, of_atoms, joint=joint, base=start, match=bool(match), draws=draws, **how)
        options = {"base": start, "match": match, **(how if match else {})}
        compare, value = _compare_tensors(networks, chosen, about, atoms, options)
    else:
        budget = parse_size(memory) or MEMORY
        try:
            compare, value = compare_maps(
                networks, chosen, about, probes=probes, draws=draws, memory=budget, matched=match is not None, **how
            )
        except NotLinear as error:
            if measures is not None or any(option is not None for option in (null, probes, input_shape, *all_sites)):
                error.add_note(f"{DEFAULT} needs linear maps; measures={INSTEAD!r} compares weights entry by entry")
                raise
            notes = [Caveat(f"weights entry by entry, since {DEFAULT} is not defined for these models: {error}")]
            options = {"match": match, **(how if match else {})}
            compare, value = _compare_tensors(
                networks, find_measures(INSTEAD, of="weights"), about, None, options, notes
            )
    if len(networks) == 2:
        return compare(0, 1)
    pairs = list(itertools.combinations(range(len(networks)), 2))
    whole = None if atoms is None else atoms.whole
    return Comparisons(tuple(network.name for network in networks), LazyComparisons(pairs, compare, value, whole))


def _check_options(
    measures: Sequence[Measure], *, joint: Joint, match: str | None, base: Any, null: str | None, probes: int | None
) -> None:
    """Raise for options that the measures do not read, or that contradict each other."""
    of_tensors = [measure.name for measure in measures if not issubclass(measure.reads, LinearMaps)]
    of_maps = [measure.name for measure in measures if measure.name not in of_tensors]
    of_atoms = [measure for measure in measures if measure.reads is Atoms]
    if of_tensors and of_maps:
        raise ValueError(
            f"{', '.join(of_tensors)} compare single tensors, {', '.join(of_maps)} networks up to a layer: use "
            "separate calls"
        )
    if of_maps and base is not None:
        raise ValueError("base= is for measures of tensors, not for wcka")
    for name, option in (("null=", None if joint else null), ("probes=", probes)):
        if of_tensors and option is not None:
            raise ValueError(f"{name} is for wcka and wcka_uncentred, not for {', '.join(of_tensors)}")
    if match is not None:
        one_of(match, "match", ["weights"])
    if joint is None:
        if of_atoms and match is not None:
            names = ", ".join(measure.name for measure in of_atoms)
            raise ValueError(f"match= with {names} is for joint=m: models that share coefficients are in one order")
        return
    if joint != POLAR:
        whole_number(joint, "joint", least=1, why="a number of atoms, or 'polar'")
    if not of_atoms:
        raise ValueError("joint= is for atom_cosine and atom_grassmann: name one as a measure")
    if joint == POLAR:
        if others := [measure.name for measure in of_atoms if measure.base != "atom_cosine"]:
            raise ValueError(f"joint='polar' has as many atoms as entries, for which {', '.join(others)} is always 1")
        if base is not None:
            raise ValueError("joint='polar' cannot be used with base=: the factor depends on the whole layer")
        if match is not None and len(of_atoms) == len(measures):
            raise ValueError(
                "joint='polar' does not depend on the order of neurons: leave out match= (it is for other measures, "
                "such as weight_cosine)"
            )


def _compare_tensors(
    networks: Sequence[Network],
    measures: Sequence[Measure],
    about: dict[str, Any],
    atoms: AtomComparison | None,
    options: dict[str, Any],
    notes: Sequence[Caveat] = (),
) -> tuple[Callable[[int, int], Comparison], Callable[[int, int, str], Array]]:
    """Return two functions for measures of tensors or of atoms: the comparison of a pair, and its values alone."""
    names = [measure.name for measure in measures]
    others = [measure for measure in measures if measure.reads is not Atoms]
    sites = [network.sites for network in networks] if atoms is None else [side.sites for side in atoms.sides]

    def compare(i: int, j: int) -> Comparison:
        values = {} if atoms is None else atoms.values(i, j)
        if others:
            a, b = networks[i], networks[j]
            side_a, side_b, more = tensor_values(
                a.model, b.model, others, sites_a=sites[i], sites_b=sites[j], names=(a.name, b.name), **options
            )
            values |= more
        else:
            assert atoms is not None
            side_a, side_b = atoms.sides[i], atoms.sides[j]
        ordered = sorted(values, key=lambda name: names.index(name) if name in names else len(names))
        noted = {name: replace(values[name], caveats=(*notes, *values[name].caveats)) for name in ordered}
        return Comparison(side_a, side_b, noted, TENSORS, about, kind="weights")

    def value(i: int, j: int, name: str) -> Array:
        measure = measures[names.index(name)] if name in names else None
        if atoms is None or measure is None or measure in others:
            return at_layers(compare(i, j), name).value
        return atoms.value(i, j, measure)[np.ix_(layers(atoms.sides[i].sites), layers(atoms.sides[j].sites))]

    return compare, value
