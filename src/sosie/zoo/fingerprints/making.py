"""The door to fingerprints: a model and a probe set in, one pass, a few short vectors out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import __version__
from ...capture import Rule, check_rule
from ...engine.arriving import Arriving
from ...engine.digest import Digest
from ...engine.sources import ModelSource
from ...engine.weights.sources import WeightSource
from ...models import NamedModel, open_model, with_name
from ...stats import check_seed
from .atom_vectors import atom_vectors
from .gram_vectors import GramVectors, gram_vectors
from .linear_vectors import linear_vectors
from .probe import Probe
from .projection import SIZE, check_size, project
from .record import ATOMS, Fingerprint, Vectors

KINDS = ("cka", "weights", "atoms")
MOST_SITES = 64


@dataclass
class _Found:
    """What has been made so far."""

    vectors: dict[str, Vectors] = field(default_factory=dict)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exact: Vectors | None = None
    model: Digest | None = None  # of the weights, where a pass has begun it
    parameters: int | None = None


def fingerprint(
    model: Any,
    probe: Any,
    *,
    kinds: str | Sequence[str] = KINDS,
    sites: Any = None,
    size: int = SIZE,
    seed: int = 0,
    rows: Rule = "flatten",
    prepare: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
) -> Fingerprint:
    """A model as short vectors, one a site, whose cosines with those of another model say how alike they are.

    `probe`: a `Probe`, or data of which the first 256 inputs are taken; all models that are to be compared must be
    shown the same. They go through the model in one batch, and no activation is kept.

    `kinds`: "cka" estimates debiased CKA from `size` numbers with a standard deviation of at most (1 − c²)/√size, and
    keeps the whole vectors for an exact answer; "weights" estimates wCKA without data, from how the network without its
    activation functions takes 256 seeded random inputs; "atoms" holds the filter atoms of models that share their
    coefficients. A model that has no such kind says so in `absent`. `size` and `seed` must be the same for all models.

    `sites`: names, globs, types; None takes for "cka" the sites that `compare` would take, for "weights" those of
    `compare_weights`. At most 64 of a kind: of more by default, 64 are taken evenly spread, which `about` says.
    `model`, `rows` (one row an input), `prepare`, `device`: as in `sosie.compare`.
    """
    check_rule(rows)
    check_size(size)
    check_seed(seed)
    wanted = _kinds(kinds)
    if isinstance(model, str):
        model = open_model(model)
    module, name, prepare = with_name(model, prepare)
    if not isinstance(module, nn.Module):
        raise TypeError(f"cannot take the fingerprint of {name}: give a torch.nn.Module or a specification of one")
    probe = Probe.of(probe)
    source = ModelSource(module, name, sites, rows, prepare, None, device)
    found = _Found()
    if "cka" in wanted:
        grams = gram_vectors(source, probe)
        found.parameters = _count(module)  # while a GPU is busy with the pass
        _add_cka(found, grams, sites, size, seed)
    if "weights" in wanted:
        _add_weights(found, WeightSource(module, name, prepare, sites, device), probe, size, seed)
    if "atoms" in wanted:
        _add_atoms(found, module, size, seed)
    if not found.vectors:
        raise ValueError(f"{name}: nothing to make a fingerprint of: {'; '.join(found.absent.values())}")
    about = {
        "architecture": _architecture(model, module),
        "parameters": found.parameters or _count(module),
        "model": (found.model or source.begun_digest()).read(),
        "sosie": __version__,
        "left_out": found.left_out,
        "notes": found.notes,
    }
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    made = found.vectors, found.labels, found.exact, found.absent
    return Fingerprint(probe.digest, probe.n, size, seed, rule, *made, about)


def _add_cka(found: _Found, made: GramVectors, asked: Any, size: int, seed: int) -> None:
    # Before it is waited for which of them mean anything; if they are many, only those that are taken.
    ahead = _brought_over(made.vectors, size, seed) if len(made.sites) <= MOST_SITES else None
    kept, left_out = made.sift()
    chosen = [kept[k] for k in _few(found, "cka", kept, asked)]
    short, whole = ahead or _brought_over(made.vectors[chosen], size, seed)
    if len(chosen) < len(whole):
        short, whole = short[chosen], whole[chosen]
    found.exact, found.model = whole.numpy(), made.model
    _keep(found, "cka", [made.sites[k] for k in chosen], short, left_out)


def _brought_over(vectors: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Short ones and whole ones on the CPU, with one wait for a GPU.

    The whole ones into memory that is touched while it is still busy: the first touch takes longer than the copy.
    """
    short = Arriving(project(vectors, size, seed))
    if vectors.device.type != "cpu":
        vectors = torch.zeros(vectors.shape, dtype=vectors.dtype, device="cpu").copy_(vectors)
    return short.read().clone(), vectors


def _add_weights(found: _Found, source: WeightSource, probe: Probe, size: int, seed: int) -> None:
    try:
        made = linear_vectors(source, probe, seed=seed)
    except ValueError as error:
        found.absent["weights"] = str(error)
        return
    chosen = _few(found, "weights", made.sites, source.sites)
    found.notes += made.notes
    _keep(found, "weights", [made.sites[k] for k in chosen], project(made.vectors[chosen], size, seed), made.left_out)


def _add_atoms(found: _Found, model: nn.Module, size: int, seed: int) -> None:
    try:
        digest, layers = atom_vectors(model, size, seed)
    except ValueError as error:
        found.absent["atoms"] = str(error)
        return
    names = list(layers)
    chosen = _few(found, "atoms", tuple(names), None)
    _keep(found, ATOMS + digest, [names[k] for k in chosen], torch.stack([layers[names[k]] for k in chosen]), {})


def _keep(found: _Found, key: str, sites: Sequence[str], vectors: Tensor, left_out: dict[str, str]) -> None:
    found.labels[key], found.vectors[key] = tuple(sites), vectors.cpu().numpy()
    if left_out:
        found.left_out.setdefault(key, {}).update(left_out)


def _architecture(model: Any, module: nn.Module) -> str:
    """The class of the module; where that is no more than a sequence, what its specification calls it."""
    own = type(module).__name__
    if own != "Sequential" or not isinstance(model, NamedModel):
        return own
    return re.split(r"[(@]", model.spec.rpartition(".py:")[2])[0].strip() or own


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _few(found: _Found, kind: str, sites: Sequence[Any], asked: Any) -> list[int]:
    """Which sites are taken: all, or of too many by default as many as may be, evenly spread, first and last in it."""
    if len(sites) <= MOST_SITES:
        return list(range(len(sites)))
    if asked is not None:
        raise ValueError(f"{len(sites)} sites of kind {kind!r}, but a fingerprint has at most {MOST_SITES}: name fewer")
    found.notes.append(f"{kind}: {MOST_SITES} of {len(sites)} sites, evenly spread")
    return [round(k * (len(sites) - 1) / (MOST_SITES - 1)) for k in range(MOST_SITES)]


def _kinds(kinds: str | Sequence[str]) -> tuple[str, ...]:
    wanted = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise ValueError(f"no kind {unknown[0]!r} of fingerprint; there are {', '.join(KINDS)}")
    if not wanted:
        raise ValueError(f"no kind of fingerprint asked for; there are {', '.join(KINDS)}")
    return wanted
