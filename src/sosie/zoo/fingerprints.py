"""Fingerprints: a model and a probe set in, a few short vectors out; how two are compared, and their files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..capture import Rule, check_rule
from ..checks import one_of, whole_number
from ..engine.network import Network
from ..engine.provenance import AsyncCopy
from ..files import DamagedFile, check_schema, read_tensors, write_tensors
from ..models import NamedModel, open_model, weights_of, with_name
from ..results import Array
from ..stats import check_seed
from .kinds import (
    FEWEST_PROBES,
    MOST_PROBES,
    SIZE,
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
        tensors = {f"vectors.{key}": torch.tensor(vectors) for key, vectors in self.vectors.items()}
        if self.exact is not None:
            tensors["exact"] = torch.tensor(self.exact)
        text = json.dumps({name: getattr(self, name) for name in SCHEMA}, ensure_ascii=False, allow_nan=False)
        return write_tensors(path, KIND, VERSION, tensors, {"fingerprint": text})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Fingerprint:
        """What `save` wrote; anything else is refused in words, and nothing in it is ever run."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        if path.stat().st_size > MOST_BYTES:
            raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes: no fingerprint has more than {MOST_BYTES:,}")
        try:
            head, tensors = read_tensors(path, KIND, VERSION)
            if len(head.get("fingerprint", "")) > MOST_TEXT:
                raise DamagedFile(f"more than {MOST_TEXT:,} characters of facts")
            return from_parts(json.loads(head["fingerprint"]), {key: each.numpy() for key, each in tensors.items()})
        except DamagedFile as error:
            if str(path) in str(error):
                raise
            raise DamagedFile(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        kinds = ", ".join(f"{key} {vectors.shape[0]} × {vectors.shape[1]}" for key, vectors in self.vectors.items())
        return f"<Fingerprint of {self.about.get('architecture', 'a model')}: {kinds}; probe {self.probe}>"


KINDS = ("cka", "weights", "atoms")
MOST_SITES = 64


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
    `model`, `rows` (one row per input), `prepare`, `device`: as in `sosie.compare`.
    """
    check_rule(rows)
    check_size(size)
    check_seed(seed)
    wanted = [one_of(kind, "a kind of fingerprint", KINDS) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if not wanted:
        raise ValueError(f"no kind of fingerprint asked for; there are {', '.join(KINDS)}")
    if isinstance(model, str):
        model = open_model(model)
    module, name, prepare = with_name(model, prepare)
    if not isinstance(module, nn.Module):
        raise TypeError(f"cannot take the fingerprint of {name}: give a torch.nn.Module or a specification of one")
    probe = Probe.of(probe)
    source = Network(module, name, sites, rows, prepare, None, device)
    vectors: dict[str, Vectors] = {}
    labels: dict[str, tuple[str, ...]] = {}
    absent: dict[str, str] = {}
    left_out: dict[str, dict[str, str]] = {}
    notes = [weights] if (weights := weights_of(model)).startswith("random weights") else []
    exact = digest = parameters = None
    if "cka" in wanted:
        grams = gram_vectors(source, probe)
        digest, parameters = grams.model, _count(module)  # while a GPU is busy with the pass
        notes += [grams.mixing] if grams.mixing else []
        # Before it is waited for which of them mean anything; if they are many, only those that are taken.
        ahead = _brought_over(grams.vectors, size, seed) if len(grams.sites) <= MOST_SITES else None
        kept, left_out["cka"] = grams.sift()
        chosen = [kept[k] for k in _few("cka", len(kept), sites, notes)]
        short, whole = ahead or _brought_over(grams.vectors[chosen], size, seed)
        if len(chosen) < len(whole):
            short, whole = short[chosen], whole[chosen]
        labels["cka"], vectors["cka"] = tuple(grams.sites[k] for k in chosen), short.numpy()
        exact = whole.numpy()
    if "weights" in wanted:
        try:
            linear, left_out["weights"], weight_notes = linear_vectors(source, probe, seed=seed)
        except ValueError as error:
            absent["weights"] = str(error)
        else:
            notes += weight_notes
            labels["weights"] = tuple(list(linear)[k] for k in _few("weights", len(linear), sites, notes))
            long = torch.stack([linear[site] for site in labels["weights"]])
            vectors["weights"] = project(long, size, seed).cpu().numpy()
    if "atoms" in wanted:
        try:
            coefficients, layers = atom_vectors(module, size, seed)
        except ValueError as error:
            absent["atoms"] = str(error)
        else:
            key = ATOMS + coefficients
            labels[key] = tuple(list(layers)[k] for k in _few("atoms", len(layers), None, notes))
            vectors[key] = torch.stack([layers[site] for site in labels[key]]).cpu().numpy()
    if not vectors:
        raise ValueError(f"{name}: nothing to make a fingerprint of: {'; '.join(absent.values())}")
    about = {
        "architecture": _architecture(model, module),
        "parameters": parameters or _count(module),
        "model": (digest or source.begun_digest()).read(),
        "sosie": __version__,
        "left_out": {kind: reasons for kind, reasons in left_out.items() if reasons},
        "notes": notes,
    }
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    return Fingerprint(probe.digest, probe.n, size, seed, rule, vectors, labels, exact, absent, about)


def _brought_over(vectors: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Short ones and whole ones on the CPU, with one wait for a GPU.

    The whole ones into memory that is touched while it is still busy: the first touch takes longer than the copy.
    """
    short = AsyncCopy(project(vectors, size, seed))
    if vectors.device.type != "cpu":
        vectors = torch.zeros(vectors.shape, dtype=vectors.dtype, device="cpu").copy_(vectors)
    return short.read().clone(), vectors


def _architecture(model: Any, module: nn.Module) -> str:
    """The class of the module; where that is no more than a sequence, what its specification calls it."""
    own = type(module).__name__
    if own != "Sequential" or not isinstance(model, NamedModel):
        return own
    return re.split(r"[(@]", model.spec.rpartition(".py:")[2])[0].strip() or own


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _few(kind: str, count: int, asked: Any, notes: list[str]) -> list[int]:
    """Which sites are taken: all, or of too many by default as many as may be, evenly spread, first and last in it."""
    if count <= MOST_SITES:
        return list(range(count))
    if asked is not None:
        raise ValueError(f"{count} sites of kind {kind!r}, but a fingerprint has at most {MOST_SITES}: name fewer")
    notes.append(f"{kind}: {MOST_SITES} of {count} sites, evenly spread")
    return [round(k * (count - 1) / (MOST_SITES - 1)) for k in range(MOST_SITES)]


# Files of fingerprints; what others send is checked before it is believed

KIND, VERSION = "fingerprint", 2
MOST_BYTES = 2**30
MOST_TEXT = 2**20  # bytes of JSON
LONGEST = 1000  # characters of a label
UNIT = 1e-4  # by which the length of a vector may be off 1, and a short vector off what the whole one gives
SCHEMA = {
    "probe": str, "n": int, "size": int, "seed": int, "rows": str, "labels": {str: [str]}, "absent": {str: str},
    "about": {},
}  # fmt: skip
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_KEY = re.compile(r"cka|weights|atoms-[0-9a-f]{8,64}")


def from_parts(facts: Any, arrays: Mapping[str, Vectors]) -> Fingerprint:
    """A fingerprint of facts and tensors that others sent, by the names of `save`; refused unless all adds up."""
    check_schema("the list of facts", facts, SCHEMA)
    labels = {key: tuple(sites) for key, sites in facts["labels"].items()}
    for key, sites in labels.items():
        if not _KEY.fullmatch(key):
            raise DamagedFile(f"no kind {key[:40]!r} of fingerprint")
        if not 1 <= len(sites) <= MOST_SITES or len({*sites}) < len(sites):
            raise DamagedFile(f"{key!r} needs 1 to {MOST_SITES} sites, each once")
    if long := [text for text in (*facts["absent"], facts["rows"], *sum(labels.values(), ())) if len(text) > LONGEST]:
        raise DamagedFile(f"a name of at most {LONGEST} characters is expected, got {long[0][:40]!r}")
    if not _DIGEST.fullmatch(facts["probe"]):
        raise DamagedFile("the hash of the probe set is none")
    wanted = {f"vectors.{key}" for key in labels} | ({"exact"} if "cka" in labels else set())
    if more := sorted({*arrays} - wanted - {"exact"}):
        raise DamagedFile(f"tensors that no fingerprint has: {', '.join(more[:4])}")
    if not labels or len({kind_of(key) for key in labels}) < len(labels):
        raise DamagedFile("no vectors, or two sets of one kind")
    if missing := sorted(wanted ^ {*arrays}):
        raise DamagedFile(f"no {missing[0]!r}: the short vectors of 'cka' come with the whole ones, and all with sites")
    n, size, seed = facts["n"], facts["size"], facts["seed"]
    try:
        whole_number(n, "the number of probes", least=FEWEST_PROBES, most=MOST_PROBES)
        check_size(size)
        check_seed(seed)
    except ValueError as error:
        raise DamagedFile(str(error)) from error
    shapes = {f"vectors.{key}": (len(sites), size) for key, sites in labels.items()}
    shapes["exact"] = len(labels.get("cka", ())), n * (n - 1) // 2
    for name, array in arrays.items():
        if array.dtype != np.float32 or array.shape != shapes[name]:
            raise DamagedFile(f"{name!r} has shape {array.shape} and is {array.dtype}, not float32 {shapes[name]}")
        if not np.isfinite(array).all():
            raise DamagedFile(f"{name!r} has numbers that are NaN or infinite")
        off = np.abs(np.linalg.norm(array.astype(np.float64), axis=1) - 1).max()
        if not off < UNIT:
            raise DamagedFile(f"{name!r} has vectors whose length is off 1 by {off:.2g}")
    vectors, exact = {key: arrays[f"vectors.{key}"] for key in labels}, arrays.get("exact")
    if exact is not None:
        apart = np.abs(project(torch.from_numpy(exact), size, seed).numpy() - vectors["cka"]).max()
        if not apart < UNIT:
            raise DamagedFile(f"the short vectors of 'cka' are not those of the whole ones: off by {apart:.2g}")
    about = facts["absent"], facts["about"]
    return Fingerprint(facts["probe"], n, size, seed, facts["rows"], vectors, labels, exact, *about)
