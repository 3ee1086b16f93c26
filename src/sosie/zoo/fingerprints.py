"""The door to fingerprints: a model and a probe set in, one pass, a few short vectors out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..capture import Rule, check_rule
from ..engine.network import Network
from ..engine.provenance import AsyncCopy, Digest
from ..files import DamagedFile, read_tensors, write_tensors
from ..models import NamedModel, open_model, with_name
from ..results import Array
from ..stats import check_seed
from .kinds import (
    FEWEST_PROBES,
    MOST_PROBES,
    SIZE,
    GramVectors,
    Probe,
    atom_vectors,
    check_size,
    gram_vectors,
    linear_vectors,
    project,
)

# A model's fingerprint: what it holds, how two of them are compared

ATOMS = "atoms-"  # and the digest of the coefficients: only models that share them can be compared
Vectors = np.ndarray[Any, np.dtype[np.float32]]


class NotComparable(ValueError):
    """Two fingerprints that were not made the same way."""


def kind_of(key: str) -> str:
    """The kind that a key of `vectors` is of: "atoms" for any coefficients."""
    return "atoms" if key.startswith(ATOMS) else key


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Short vectors of length 1 of a model's sites, in float32.

    Kinds of vectors, by their keys: "cka" (a cosine estimates debiased CKA on the probe set), "weights" (wCKA),
    "atoms-…" (atom cosine; the digest of the coefficients is part of the key). `exact` holds, site by site of "cka",
    the whole vectors, whose cosine is debiased CKA.
    """

    probe: str  # hash of the probe set
    n: int  # inputs of it
    size: int
    seed: int
    rows: str  # rule by which activations became rows
    vectors: dict[str, Vectors]  # (sites of the kind, size)
    labels: dict[str, tuple[str, ...]]  # the sites of each kind, in execution order
    exact: Vectors | None  # (sites of "cka", n (n − 1) / 2)
    absent: dict[str, str]  # kinds asked for that the model does not have, with the reason
    about: dict[str, Any]  # architecture, parameters, model (digest of the weights), sosie (version), left_out, notes

    @property
    def sites(self) -> list[str]:
        """Those of "cka", else of the first kind that there is."""
        return list(self.labels.get("cka") or next(iter(self.labels.values()), ()))

    @property
    def kinds(self) -> list[str]:
        return [kind_of(key) for key in self.vectors]

    def key(self, kind: str) -> str:
        """The key of `vectors` for "cka", "weights" or "atoms"."""
        found = next((key for key in self.vectors if kind in (key, kind_of(key))), None)
        if found is None:
            why = self.absent.get(kind, f"it was not asked for; there are {', '.join(self.kinds)}")
            raise NotComparable(f"no fingerprint of kind {kind!r}: {why}")
        return found

    def check_comparable(self, other: Fingerprint) -> None:
        """Raise unless both were made of one probe set, with one size, seed and rule."""
        if self.probe != other.probe:
            raise NotComparable(f"fingerprints of different probe sets: {self.probe} and {other.probe}")
        for name in ("n", "size", "seed", "rows"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise NotComparable(f"fingerprints made differently: {name}={mine!r} and {name}={theirs!r}")

    def cosine(self, other: Fingerprint, kind: str = "cka", *, exact: bool = False) -> Array:
        """Site by site, (sites of this one, of the other); `exact` takes the whole vectors of "cka".

        NaN for atoms of different layers, which share no coefficients.
        """
        self.check_comparable(other)
        if exact:
            if kind != "cka" or self.exact is None or other.exact is None:
                raise NotComparable(f"exact=True is for fingerprints of kind 'cka' that both have, not for {kind!r}")
            return self.exact.astype(np.float64) @ other.exact.astype(np.float64).T
        mine, theirs = self.key(kind), other.key(kind)
        if mine != theirs:
            raise NotComparable(f"atoms with different coefficients ({mine} and {theirs}) have nothing in common")
        found = self.vectors[mine].astype(np.float64) @ other.vectors[theirs].astype(np.float64).T
        if kind_of(mine) == "atoms":
            same = [[a == b for b in other.labels[theirs]] for a in self.labels[mine]]
            found = np.where(same, found, np.nan)
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As one safetensors file, which `Fingerprint.load` reads."""

        return save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Fingerprint:
        """What `save` wrote; anything else is refused in words, and nothing in it is ever run."""

        return load(path)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{key} {vectors.shape[0]} × {vectors.shape[1]}" for key, vectors in self.vectors.items())
        return f"<Fingerprint of {self.about.get('architecture', 'a model')}: {kinds}; probe {self.probe}>"


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
    source = Network(module, name, sites, rows, prepare, None, device)
    found = _Found()
    if "cka" in wanted:
        grams = gram_vectors(source, probe)
        found.parameters = _count(module)  # while a GPU is busy with the pass
        _add_cka(found, grams, sites, size, seed)
    if "weights" in wanted:
        _add_weights(found, source, probe, size, seed)
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
    short = AsyncCopy(project(vectors, size, seed))
    if vectors.device.type != "cpu":
        vectors = torch.zeros(vectors.shape, dtype=vectors.dtype, device="cpu").copy_(vectors)
    return short.read().clone(), vectors


def _add_weights(found: _Found, source: Network, probe: Probe, size: int, seed: int) -> None:
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


# Fingerprints as safetensors files; what others send is checked before it is believed

KIND, VERSION = "fingerprint", 2
MOST_BYTES = 2**30
MOST_TEXT = 2**20  # bytes of JSON
LONGEST = 1000  # characters of a label
UNIT = 1e-4  # by which the length of a vector may be off 1, and a short vector off what the whole one gives
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_KEY = re.compile(r"cka|weights|atoms-[0-9a-f]{8,64}")


def save(found: Fingerprint, path: str | os.PathLike[str]) -> Path:
    arrays = {f"vectors.{key}": vectors for key, vectors in found.vectors.items()}
    if found.exact is not None:
        arrays["exact"] = found.exact
    names = ("probe", "n", "size", "seed", "rows", "labels", "absent", "about")
    text = json.dumps({name: getattr(found, name) for name in names}, ensure_ascii=False, allow_nan=False)
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    return write_tensors(path, KIND, VERSION, tensors, {"fingerprint": text})


def load(path: str | os.PathLike[str]) -> Fingerprint:
    """Refused: too large a file, other tensors than it says, wrong shapes, numbers not finite, lengths not 1."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.stat().st_size > MOST_BYTES:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes: no fingerprint has more than {MOST_BYTES:,}")
    try:
        return _checked(*_read(path))
    except DamagedFile as error:
        if str(path) in str(error):
            raise
        raise DamagedFile(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def from_parts(facts: dict[str, Any], arrays: dict[str, Vectors]) -> Fingerprint:
    """A fingerprint of facts and tensors that others sent, by the names of `save`; checked as a file is."""
    try:
        return _checked(facts, dict(arrays))
    except DamagedFile:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"it is damaged: {type(error).__name__}: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Vectors]]:
    head, tensors = read_tensors(path, KIND, VERSION)
    for key, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise DamagedFile(f"{key!r} is not float32")
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    if len(head.get("fingerprint", "")) > MOST_TEXT:
        raise DamagedFile(f"more than {MOST_TEXT:,} characters of facts")
    facts = json.loads(head["fingerprint"])
    if not isinstance(facts, dict):
        raise DamagedFile("its facts are no JSON object")
    return facts, arrays


def _checked(facts: dict[str, Any], arrays: dict[str, Vectors]) -> Fingerprint:
    n, size, seed = (_whole(facts, name) for name in ("n", "size", "seed"))
    if not FEWEST_PROBES <= n <= MOST_PROBES:
        raise DamagedFile(f"{n} probes; a fingerprint has {FEWEST_PROBES} to {MOST_PROBES}")
    check_size(size)
    if not isinstance(facts["probe"], str) or not _DIGEST.fullmatch(facts["probe"]):
        raise DamagedFile("the hash of the probe set is none")
    labels = {key: _labels(key, some) for key, some in _dictionary(facts, "labels").items()}
    absent = {_text(kind): _text(why, 10 * LONGEST) for kind, why in _dictionary(facts, "absent").items()}
    vectors = {key: arrays.pop(f"vectors.{key}") for key in labels}
    exact = arrays.pop("exact", None)
    if arrays:
        raise DamagedFile(f"tensors that no fingerprint has: {', '.join(sorted(arrays)[:4])}")
    if not vectors or len({kind_of(key) for key in vectors}) < len(vectors):
        raise DamagedFile("no vectors, or two sets of one kind")
    if (exact is None) != ("cka" not in vectors):
        raise DamagedFile("the short vectors of 'cka' come with the whole ones")
    for key, some in vectors.items():
        _check_vectors(key, some, (len(labels[key]), size))
    if exact is not None:
        _check_vectors("exact", exact, (len(labels["cka"]), n * (n - 1) // 2))
        apart = np.abs(project(torch.from_numpy(exact), size, seed).numpy() - vectors["cka"]).max()
        if not apart < UNIT:
            raise DamagedFile(f"the short vectors of 'cka' are not those of the whole ones: off by {apart:.2g}")
    about = _dictionary(facts, "about")
    return Fingerprint(facts["probe"], n, size, seed, _text(facts["rows"]), vectors, labels, exact, absent, about)


def _check_vectors(key: str, found: Vectors, shape: tuple[int, int]) -> None:
    if found.shape != shape:
        raise DamagedFile(f"{key!r} has shape {found.shape}, not {shape}")
    if not np.isfinite(found).all():
        raise DamagedFile(f"{key!r} has numbers that are NaN or infinite")
    off = np.abs(np.linalg.norm(found.astype(np.float64), axis=1) - 1).max()
    if not off < UNIT:
        raise DamagedFile(f"{key!r} has vectors whose length is off 1 by {off:.2g}")


def _labels(key: str, found: Any) -> tuple[str, ...]:
    if not _KEY.fullmatch(key):
        raise DamagedFile(f"no kind {key[:40]!r} of fingerprint")
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_SITES or len({*map(_text, found)}) < len(found):
        raise DamagedFile(f"{key!r} needs 1 to {MOST_SITES} sites, each once")
    return tuple(found)


def _whole(facts: dict[str, Any], name: str) -> int:
    found = facts[name]
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) >= 2**40:
        raise DamagedFile(f"{name} is {str(found)[:40]!r}, no whole number in its range")
    return found


def _dictionary(facts: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(facts[name], dict):
        raise DamagedFile(f"{name} is no JSON object")
    return facts[name]


def _text(found: Any, longest: int = LONGEST) -> str:
    if not isinstance(found, str) or len(found) > longest:
        raise DamagedFile(f"expected text of at most {longest} characters, got {str(found)[:40]!r}")
    return found
