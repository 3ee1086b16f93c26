"""Fingerprints: a model and a probe set in, a few short vectors out.

Here are the probe set, the vectors of each kind, the comparison of two fingerprints, their files, and the settings that
all fingerprints of a zoo share.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import __version__
from ..capture import (
    ONE_ROW,
    RULES,
    Batches,
    Chunk,
    Rule,
    check_rule,
    gives_several_rows,
    model_arguments,
    recut,
    rule_name,
    unwrap,
    without_labels,
)
from ..capture.batches import is_text
from ..checks import listed, one_of, whole_number
from ..data import open_data
from ..engine.network import Network
from ..engine.provenance import digest_of, digest_of_model, sent_to_cpu
from ..files import DamagedFile, check_schema, read_nested, read_tensors, reading, write_nested, write_tensors
from ..linalg import centred_diagonal, double_centred, gram_cuda, gram_stack, live_gram, u_centred, widened, with_room
from ..models import NamedModel, atom_layers, open_model, weights_of, with_name
from ..process_state import products
from ..results import Array
from ..stats import Buckets, check_seed
from ..weights import maps
from .store import Facts, Record
from .vectors import EXACT, Floats

# The inputs that all models are shown

PROBES = 256
FEWEST_PROBES = 4  # for U-centring
MOST_PROBES = 2048  # beyond, the exact vectors of a model's sites take half a gigabyte
PROBE_GONE = (
    "the probe set is gone: no file {}; Zoo(folder, data=…).check(repair=True) with the data it was made of, or "
    "`sosie zoo check FOLDER --repair --data …`, puts it back"
)


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs in one batch, and the hash that tells whether two fingerprints saw the same inputs."""

    batch: Any
    n: int
    digest: str  # of the inputs, their order and their type; labels and batch sizes do not change it

    @classmethod
    def of(cls, data: Any, most: int = PROBES) -> Probe:
        """Return the first inputs of the data, at most `most`; `data` is what `sosie.compare` takes."""
        if isinstance(data, Probe):
            return data
        whole_number(most, "the number of probes", least=FEWEST_PROBES, most=MOST_PROBES)
        batches = Batches(open_data(data) if isinstance(data, str) else data)
        chunk = next(recut(batches, block=most, max_rows=most), None)
        if chunk is None:
            raise ValueError("the data yielded no inputs")
        if chunk.count < FEWEST_PROBES:
            raise ValueError(f"a probe set needs at least {FEWEST_PROBES} inputs, got {chunk.count}")
        return cls(chunk.batch, chunk.count, digest_of(without_labels(chunk.batch)))

    @property
    def is_padded(self) -> bool:
        """Whether the inputs are texts, or have an attention mask that leaves tokens out."""
        inputs = without_labels(self.batch)
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        return is_text(inputs) or (isinstance(mask, Tensor) and not bool(mask.all()))

    def save(self, path: Path) -> Path:
        """Write one file: tensors as they are, their structure as JSON."""
        try:
            return write_nested(path, "probe", 2, {"n": self.n, "hash": self.digest}, self.batch)
        except TypeError as error:
            raise TypeError(f"this probe set cannot be saved: {error}") from error

    @classmethod
    def load(cls, path: Path, digest: str | None = None) -> Probe:
        """Read the inputs; their hash, computed anew, must be that of the file, and `digest` if given."""
        if not path.is_file():
            raise FileNotFoundError(PROBE_GONE.format(path))
        about, batch = read_nested(path, "probe", 2)
        with reading(path):
            n, actual = int(about["n"]), digest_of(without_labels(batch))
        wanted = about.get("hash") if digest is None else digest
        if actual != wanted or not 0 < n <= MOST_PROBES:
            raise DamagedFile(f"{path} holds {n} inputs of hash {actual}; the zoo was made with hash {wanted}")
        return cls(batch, n, actual)

    def __repr__(self) -> str:
        return f"<Probe {self.digest}: {self.n} inputs>"


# The fingerprint of a model

FINGERPRINT_KINDS = ("cka", "weights", "atoms")
ATOMS = "atoms-"  # followed by the digest of the coefficients: only models that share them can be compared
MADE = ("probe", "n", "size", "seed", "rows")  # the same in all fingerprints that are compared
SIZE = 512
MOST_SITES = 64


class NotComparable(ValueError):
    """The two fingerprints were not made in the same way."""


def kind_of(key: str) -> str:
    """Return the kind of a key of `vectors`: "atoms" for any coefficients."""
    return "atoms" if key.startswith(ATOMS) else key


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Short vectors of length 1 for the sites of a model, in float32.

    The keys of `vectors` are "cka" (a cosine estimates debiased CKA on the probe set), "weights" (wCKA) and "atoms-…"
    (atom cosine; the digest of the coefficients is part of the key). `exact` holds the whole vectors of "cka", whose
    cosine is debiased CKA.
    """

    probe: str  # hash of the probe set
    n: int  # its inputs
    size: int
    seed: int
    rows: str  # the row rule
    vectors: dict[str, Floats]  # (sites of the kind, size)
    labels: dict[str, tuple[str, ...]]  # the sites of each kind, in execution order
    exact: Floats | None  # (sites of "cka", n (n − 1) / 2)
    absent: dict[str, str]  # requested kinds that the model lacks, with the reason
    # Architecture, parameters, model (digest of the weights), modules (digest of what it prints), sites (as asked for),
    # sosie (version), left_out, notes.
    about: dict[str, Any]

    @property
    def sites(self) -> list[str]:
        """The sites of "cka", else of the first kind."""
        return list(self.labels.get("cka") or next(iter(self.labels.values()), ()))

    @property
    def kinds(self) -> list[str]:
        return [kind_of(key) for key in self.vectors]

    def key(self, kind: str) -> str:
        """Return the key of `vectors` for "cka", "weights" or "atoms"."""
        for key in self.vectors:
            if kind in (key, kind_of(key)):
                return key
        why = self.absent.get(kind, f"it was not requested; there are {', '.join(self.kinds)}")
        raise NotComparable(f"no fingerprint of kind {kind!r}: {why}")

    def check_comparable(self, other: Fingerprint) -> None:
        """Raise unless both have the same probe set, size, seed and row rule."""
        for name in MADE:
            if (a := getattr(self, name)) != (b := getattr(other, name)):
                raise NotComparable(f"fingerprints differ in {name}: {a} and {b}")

    def cosine(self, other: Fingerprint, kind: str = "cka", *, exact: bool = False) -> Array:
        """Return the cosines, (sites of this one, sites of the other); `exact` takes the whole vectors of "cka".

        Atoms of different layers share no coefficients: their cosine is NaN.
        """
        self.check_comparable(other)
        if exact:
            if kind != "cka" or self.exact is None or other.exact is None:
                raise NotComparable(f"exact=True needs whole vectors of kind 'cka' in both, got kind {kind!r}")
            return self.exact.astype(np.float64) @ other.exact.astype(np.float64).T
        key, other_key = self.key(kind), other.key(kind)
        if key != other_key:
            raise NotComparable(f"atoms with different coefficients ({key} and {other_key}) cannot be compared")
        cosines = self.vectors[key].astype(np.float64) @ other.vectors[key].astype(np.float64).T
        if kind_of(key) == "atoms":
            same = [[a == b for b in other.labels[key]] for a in self.labels[key]]
            cosines = np.where(same, cosines, np.nan)
        return cosines

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, which `Fingerprint.load` reads."""
        tensors = {f"vectors.{key}": torch.tensor(vectors) for key, vectors in self.vectors.items()}
        if self.exact is not None:
            tensors["exact"] = torch.tensor(self.exact)
        text = json.dumps({name: getattr(self, name) for name in SCHEMA}, ensure_ascii=False, allow_nan=False)
        return write_tensors(path, KIND, VERSION, tensors, {"fingerprint": text})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Fingerprint:
        """Read a file that `save` wrote; any other is refused, and nothing in it is ever run."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        if path.stat().st_size > MOST_BYTES:
            raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes: no fingerprint has more than {MOST_BYTES:,}")
        with reading(path):
            head, tensors = read_tensors(path, KIND, VERSION)
            if len(head.get("fingerprint", "")) > MOST_TEXT:
                raise DamagedFile(f"more than {MOST_TEXT:,} characters of facts")
            return from_parts(json.loads(head["fingerprint"]), {key: tensor.numpy() for key, tensor in tensors.items()})

    def __repr__(self) -> str:
        kinds = ", ".join(f"{key} {vectors.shape[0]} × {vectors.shape[1]}" for key, vectors in self.vectors.items())
        return f"<Fingerprint of {self.about.get('architecture', 'a model')}: {kinds}; probe {self.probe}>"


def fingerprint(
    model: Any,
    probe: Any,
    *,
    kinds: str | Sequence[str] = FINGERPRINT_KINDS,
    sites: Any = None,
    size: int = SIZE,
    seed: int = 0,
    rows: Rule = "flatten",
    prepare: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
) -> Fingerprint:
    """Return short vectors, one per site, whose cosines with those of another model say how alike the sites are.

    `probe`: a `Probe`, or data whose first 256 inputs are taken; models to be compared must see the same inputs. They
    go through the model in one batch, and no activation is kept.

    `kinds`: "cka" estimates debiased CKA from `size` numbers with a standard deviation of at most (1 − c²)/√size, and
    keeps the whole vectors for an exact answer; "weights" estimates wCKA without data, from the answers of the network
    without its activation functions to 256 seeded random inputs; "atoms" holds the filter atoms, for models that share
    their coefficients. If the model lacks a kind, `absent` says why. `size` and `seed` must be the same for all models.

    `sites`: names, globs, types; None takes the default sites of `compare` for "cka", of `compare_weights` for
    "weights". At most 64 of a kind: of more default sites, 64 are taken, evenly spread, and `about` reports it.
    `model`, `rows` (one row per input), `prepare`, `device`: as in `sosie.compare`.
    """
    check_rule(rows)
    check_size(size)
    check_seed(seed)
    wanted = [
        one_of(kind, "a kind of fingerprint", FINGERPRINT_KINDS)
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ]
    if not wanted:
        raise ValueError(f"no kind of fingerprint requested; there are {', '.join(FINGERPRINT_KINDS)}")
    if isinstance(model, str):
        model = open_model(model)
    module, name, prepare = with_name(model, prepare)
    if not isinstance(module, nn.Module):
        raise TypeError(f"cannot take the fingerprint of {name}: give a torch.nn.Module or a specification of one")
    probe = Probe.of(probe)
    source = Network(module, name, sites, rows, prepare, None, device)
    vectors: dict[str, Floats] = {}
    labels: dict[str, tuple[str, ...]] = {}
    absent: dict[str, str] = {}
    left_out: dict[str, dict[str, str]] = {}
    notes = [weights] if (weights := weights_of(model)).startswith("random weights") else []
    exact = digest = None
    if "cka" in wanted:
        labels["cka"], short, whole, left_out["cka"], digest = cka_vectors(source, probe, size, seed, sites, notes)
        vectors["cka"], exact = short.numpy(), whole.numpy()
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
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "model": (digest or source.begin_digest())(),
        "modules": digest_of_model(module),
        "sites": repr(sites),
        "sosie": __version__,
        "left_out": {kind: reasons for kind, reasons in left_out.items() if reasons},
        "notes": notes,
    }
    return Fingerprint(probe.digest, probe.n, size, seed, rule_name(rows), vectors, labels, exact, absent, about)


def _architecture(model: Any, module: nn.Module) -> str:
    """Return the class of the module; for a plain Sequential, its name in the specification."""
    name = type(module).__name__
    if name != "Sequential" or not isinstance(model, NamedModel):
        return name
    return re.split(r"[(@]", model.spec.rpartition(".py:")[2])[0].strip() or name


def _few(kind: str, count: int, asked: Any, notes: list[str]) -> list[int]:
    """Return the places of the sites to take: all, or of too many by default the most allowed, evenly spread."""
    if count <= MOST_SITES:
        return list(range(count))
    if asked is not None:
        raise ValueError(f"{count} sites of kind {kind!r}, but a fingerprint holds at most {MOST_SITES}: name fewer")
    notes.append(f"{kind}: {MOST_SITES} of {count} sites, evenly spread")
    return [round(k * (count - 1) / (MOST_SITES - 1)) for k in range(MOST_SITES)]


# Long vectors to short ones, in the same way for every model: cosines stay the same, but for a stated error

SMALLEST, LARGEST = 16, 4096
AT_ONCE = 2**24  # numbers widened to float64 at a time


def check_size(size: int) -> None:
    whole_number(size, "size", least=SMALLEST, most=LARGEST, why="256 to 1024 are good choices")


def project(vectors: Tensor, size: int = SIZE, seed: int = 0) -> Tensor:
    """Return vectors (k, length) as (k, size) of length 1, in float32, on their device; short ones are zero-padded.

    A CountSketch (Charikar et al. 2002): entry i goes to one of `size` places, with a sign, both decided by `seed` and
    i alone, so no matrix is made or kept.
    """
    check_size(size)
    home = vectors.device if vectors.device.type in ("cpu", "cuda") else torch.device("cpu")  # others have no float64
    vectors = vectors.detach().to(home)
    length = vectors.shape[1]
    parts = []
    for part in vectors.split(max(1, AT_ONCE // length)):
        if length <= size:
            short = pad(part.double(), (0, size - length))
        else:
            places, signs = _drawn(size, seed, length, home)
            sums = part.new_zeros(size, len(part), dtype=torch.float64)
            # Adding whole rows is several times as fast as adding columns.
            short = sums.index_add_(0, places, (part.double() * signs).T).T
        parts.append(unit(short).float())
    return torch.cat(parts)


@lru_cache(maxsize=2)
def _drawn(size: int, seed: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places and signs, cached: they are the same for every model."""
    with torch.inference_mode(False):
        drawn = Buckets(size, seed).draw(0, length, torch.device("cpu"))
        return drawn.buckets[0].to(device), drawn.signs[0].to(device)


def standard_deviation(cosine: float, size: int = SIZE) -> float:
    """Return a bound, but for terms of 1/size, on the deviation of the cosine of projected vectors from the true one.

    For unit x and y with cosine c the variance is ((1 − c²)² − 2 Σ (xᵢyᵢ − c (xᵢ² + yᵢ²)/2)²) / size by the delta
    method; the sum is small unless a few entries carry the vectors. The mean is off by c (1 − c²) / (2 size) at most.
    """
    return float((1 - cosine**2) / size**0.5)


def unit(vectors: Tensor) -> Tensor:
    """Return each vector over its length."""
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)


# Kind "cka": the U-centred Gram matrix of each site as one vector, whose cosine is debiased CKA

ROUNDING = 16  # units in the last place of an activation: rows that differ by less are equal
GRAM_LOST = 1e-5  # of a Gram matrix's norm: what float32 products leave when U-centring removes everything
TOGETHER = 2**24  # entries of Gram matrices that are processed together
EQUAL = "is the same for all probes"
NOTHING = "has the same distance between any two probes: nothing is left to compare"


def cka_vectors(
    source: Network, probe: Probe, size: int, seed: int, asked: Any, notes: list[str]
) -> tuple[tuple[str, ...], Tensor, Tensor, dict[str, str], Callable[[], str]]:
    """Return the sites, their short and whole vectors on the CPU, why other sites have none, and the weights' digest.

    It takes one forward pass; the rows of each site become a Gram matrix as they appear, and no activation is kept. On
    a GPU all work is queued before the first wait. `asked`: the sites that were named, if any.
    """

    def sink(site: str, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        if len(rows) != probe.n:
            raise ValueError(
                f"{site}: {len(rows)} rows for {probe.n} probes, but a fingerprint needs one row per input: "
                f"rows='flatten', or {ONE_ROW}"
            )
        return *_gram(rows), torch.finfo(rows.dtype).eps

    with source.opened():
        made = source.read(Chunk(probe.batch, 0, probe.n), sink)
        sites, left_out = tuple(source.per_input()), dict(source.left_out)
        digest = source.begin_digest()
    step = max(1, TOGETHER // probe.n**2)
    parts = [_vectors(made[k : k + step]) for k in range(0, len(made), step)]
    vectors, lengths = (torch.cat(some) for some in zip(*parts, strict=True))
    arrived = sent_to_cpu(lengths)
    # Started before it is known which are usable; if there are many sites, only for those that are taken.
    ahead = _brought_over(vectors, size, seed) if len(sites) <= MOST_SITES else None
    kept = []
    for k, (norm, whole, spread, first) in enumerate(arrived().tolist()):
        if not norm < torch.inf:
            raise ValueError(f"{source.name}: activations at {sites[k]} are NaN, infinite or too large for a product")
        if not spread > (ROUNDING * made[k][2]) ** 2 * first:  # also where the activations are 0
            left_out[sites[k]] = EQUAL
        elif not norm > GRAM_LOST * whole:
            left_out[sites[k]] = NOTHING
        else:
            kept.append(k)
    if not kept:
        raise ValueError(f"{source.name}: no site is left: {'; '.join(f'{s} {why}' for s, why in left_out.items())}")
    chosen = [kept[k] for k in _few("cka", len(kept), asked, notes)]
    short, exact = ahead or _brought_over(vectors[chosen], size, seed)
    if len(chosen) < len(exact):
        short, exact = short[chosen], exact[chosen]
    return tuple(sites[k] for k in chosen), short, exact, left_out, digest


def _brought_over(vectors: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return short and whole vectors on the CPU, with one wait for a GPU.

    The memory for the whole ones is touched while the GPU is busy: the first touch takes longer than the copy.
    """
    short = sent_to_cpu(project(vectors, size, seed))
    if vectors.device.type != "cpu":
        vectors = torch.zeros(vectors.shape, dtype=vectors.dtype, device="cpu").copy_(vectors)
    return short().clone(), vectors


def _gram(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix, centred enough that products of few digits do not lose the spread, and ‖first row‖²."""
    if rows.is_cuda:
        return _gram_on_gpu(rows)
    rows = with_room(rows, "the activations")  # one strip of columns is centred at a time, while it is in the cache
    return live_gram(rows), widened(rows[0]).square().sum()


def _gram_on_gpu(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first row is subtracted, which needs neither the other rows nor a wait; U-centring removes the rest."""
    if gram_cuda.suits(rows[None], "first"):
        grams, lengths = gram_cuda.gram_blocks(rows[None], about="first", tf32=True)
        return grams[0], lengths[0]
    rows = widened(rows)
    with products(tf32=True):
        return gram_stack((rows - rows[:1])[None])[0], rows[0].square().sum()


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return one float64 tensor on a device that has float64; a model may be spread over several devices."""
    home = tensors[0].device if tensors[0].device.type in ("cpu", "cuda") else torch.device("cpu")
    return torch.stack([each.to(home) for each in tensors]).double()


def _vectors(made: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Return vectors (k, n (n − 1) / 2) of length 1, and four lengths of each (k, 4), which show whether it is usable.

    These are the norms of the U-centred and of the centred matrix, and the squared distances of the rows from their
    mean and of the first row from zero.
    """
    grams, first = _stacked([gram for gram, *_ in made]), _stacked([length for _, length, _ in made])
    centred = u_centred(grams)
    norm = centred.flatten(1).norm(dim=1)
    whole = double_centred(grams).flatten(1).norm(dim=1)
    spread = centred_diagonal(grams).mean(1)
    i, j = torch.triu_indices(grams.shape[1], grams.shape[1], 1, device=grams.device)
    vectors = centred[:, i, j] * (2**0.5 / norm[:, None])
    return vectors.float(), torch.stack([norm, whole, spread, first], dim=1)


# Kind "weights": no data; the network without its activation functions, run on seeded random inputs
#
# For independent Gaussian u and v the mean of (uᵀHKHv)(uᵀHLHv) is ⟨HKH, HLH⟩, with K = W Wᵀ of the linear map W of a
# site and H the centring over the entries of the input: vectors of uᵀHKHv over many pairs have a cosine that tends to
# wCKA. All pairs within blocks of inputs are used, far more than separate pairs of as many inputs.

MAP_LOST = 1e-12  # of the products' norm: what float64 leaves when centring removes everything


@products()  # a forward pass reads the weights here, without the caller's autocast
def linear_vectors(
    source: Network, probe: Probe, *, seed: int
) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return the vectors (pairs,) of length 1 by site, in float64 and execution order; why others have none; and notes.

    ValueError (NotLinear) if the model without its activation functions is not a linear map of its input.
    """
    maps.check_weights(source)
    linear = maps.look(source, input_shape(probe.batch))
    grams = maps.random_grams(linear, maps.FEWEST, seed)
    block = grams[True].shape[-1]
    i, j = torch.triu_indices(block, block, 1)
    centred, plain = (grams[kind][..., i, j].transpose(0, 1).flatten(1) for kind in (True, False))
    left = centred.norm(dim=1) > MAP_LOST * plain.norm(dim=1)
    sites = dict(zip(linear.side.sites, left.tolist(), strict=True))
    if not any(sites.values()):
        raise ValueError("its linear map is the same for each entry of the input: nothing is left to compare")
    why = "as a linear map is the same for each entry of the input"
    kept = [site for site, there in sites.items() if there]
    vectors = dict(zip(kept, unit(centred[left]), strict=True))
    return vectors, {site: why for site in sites if site not in kept}, linear.notes


def input_shape(batch: Any) -> tuple[int, ...] | None:
    """Return the shape of one input if the model takes one tensor."""
    args, _ = model_arguments(batch)
    first = args[0] if len(args) == 1 else None
    return tuple(first.shape[1:]) if isinstance(first, Tensor) and first.ndim > 1 else None


# Kind "atoms": the filter atoms of each layer, comparable only between models that share their coefficients


def atom_vectors(model: nn.Module, size: int, seed: int) -> tuple[str, dict[str, Tensor]]:
    """Return the digest of the coefficients, and the atoms of each layer as one vector (size,) of length 1."""
    layers = atom_layers(unwrap(model))
    if not layers:
        raise ValueError("the model has no layer of filter atoms")
    vectors = {}
    for name, layer in layers.items():
        atoms = layer.atoms.detach().cpu().double().flatten()
        largest = atoms.abs().max()
        if not bool(torch.isfinite(largest)) or not bool(largest > 0):
            raise ValueError(f"the atoms of {name} are {'all 0' if not bool(largest) else 'NaN or infinite'}")
        # Divided by the largest first: the squares of very small or large numbers are 0 or infinite.
        vectors[name] = project((atoms / largest)[None], size, seed)[0]
    shared = {name: (tuple(layer.atoms.shape), layer.coefficients.detach().float()) for name, layer in layers.items()}
    return digest_of(shared), vectors


# Files of fingerprints; a file from others is checked before it is used

KIND, VERSION = "fingerprint", 2
MOST_BYTES = 2**30
MOST_TEXT = 2**20  # bytes of JSON
LONGEST = 1000  # characters of a label
UNIT = 1e-4  # tolerance for the length of a vector, and for a short vector against the projected whole one
SCHEMA = {
    "probe": str, "n": int, "size": int, "seed": int, "rows": str, "labels": {str: [str]}, "absent": {str: str},
    "about": {},
}  # fmt: skip
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_KEY = re.compile(r"cka|weights|atoms-[0-9a-f]{8,64}")


def from_parts(facts: Any, arrays: Mapping[str, Floats]) -> Fingerprint:
    """Return a fingerprint of facts and tensors from others, named as in `save`; raise unless they are consistent."""
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
        raise DamagedFile("the hash of the probe set is malformed")
    wanted = {f"vectors.{key}" for key in labels} | ({"exact"} if "cka" in labels else set())
    if more := sorted({*arrays} - wanted - {"exact"}):
        raise DamagedFile(f"tensors that no fingerprint has: {listed(more)}")
    if not labels or len({kind_of(key) for key in labels}) < len(labels):
        raise DamagedFile("no vectors, or two sets of one kind")
    if missing := sorted(wanted ^ {*arrays}):
        raise DamagedFile(f"no {missing[0]!r}: the short vectors of 'cka' come with the whole ones, and all with sites")
    n, size, seed = facts["n"], facts["size"], facts["seed"]
    whole_number(n, "the number of probes", least=FEWEST_PROBES, most=MOST_PROBES)
    check_size(size)
    check_seed(seed)
    shapes = {f"vectors.{key}": (len(sites), size) for key, sites in labels.items()}
    shapes["exact"] = len(labels.get("cka", ())), n * (n - 1) // 2
    for name, array in arrays.items():
        if array.dtype != np.float32 or array.shape != shapes[name]:
            raise DamagedFile(f"{name!r} has shape {array.shape} and is {array.dtype}, not float32 {shapes[name]}")
        if not np.isfinite(array).all():
            raise DamagedFile(f"{name!r} has numbers that are NaN or infinite")
        off = np.abs(np.linalg.norm(array.astype(np.float64), axis=1) - 1).max()
        if not off < UNIT:
            raise DamagedFile(f"{name!r} has vectors whose length differs from 1 by {off:.2g}")
    vectors, exact = {key: arrays[f"vectors.{key}"] for key in labels}, arrays.get("exact")
    if exact is not None:
        off = np.abs(project(torch.from_numpy(exact), size, seed).numpy() - vectors["cka"]).max()
        if not off < UNIT:
            raise DamagedFile(f"the short vectors of 'cka' are not those of the whole ones: off by {off:.2g}")
    made = facts["probe"], n, size, seed, facts["rows"]
    return Fingerprint(*made, vectors, labels, exact, facts["absent"], facts["about"])


# What all models of a zoo share: the probe set and how fingerprints are made

ROWS = tuple(rule for rule in RULES if not gives_several_rows(rule))


@dataclass(frozen=True)
class Settings:
    """The probe set and how fingerprints are made, pinned when the zoo is made."""

    probe: str  # hash
    n: int
    size: int = SIZE
    seed: int = 0
    kinds: tuple[str, ...] = FINGERPRINT_KINDS
    rows: str = "flatten"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds))
        check_size(self.size)
        check_seed(self.seed)
        if not isinstance(self.rows, str):
            raise TypeError("rows= of a zoo is one of the named rules, which other processes know too, not a function")
        one_of(self.rows, "rows (a fingerprint has one row per input)", ROWS)
        if not self.kinds or len(set(self.kinds)) < len(self.kinds) or not set(self.kinds) <= set(FINGERPRINT_KINDS):
            got = ", ".join(map(str, self.kinds)) or "none"
            raise ValueError(f"kinds must be some of {', '.join(FINGERPRINT_KINDS)}, each once, got {got}")
        if not isinstance(self.probe, str) or not _DIGEST.fullmatch(self.probe) or not isinstance(self.n, int):
            raise ValueError(f"not the hash of a probe set: {str(self.probe)[:40]!r}")

    @classmethod
    def from_json(cls, about: dict[str, Any]) -> Settings:
        try:
            return cls(**{name: about[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"the settings of the zoo are damaged: {type(error).__name__}: {error}") from error

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kinds": list(self.kinds)}

    def check_same(self, given: dict[str, Any], folder: Any) -> None:
        """Raise if an existing zoo was opened with other settings."""
        for name, value in asdict(replace(self, **given)).items():
            if value != (pinned := getattr(self, name)):
                raise ValueError(f"{folder} was made with {name}={pinned!r}, not {value!r}; all its models share it")

    def check_probe(self, probe: Probe, folder: Any) -> None:
        if probe.digest != self.probe:
            raise ValueError(
                f"another probe set: {folder} was made with {self.n} inputs of hash {self.probe}, data= gives "
                f"{probe.n} of hash {probe.digest}; a loader that shuffles gives others each time. Leave data= out to "
                "use that of the zoo, or make another zoo"
            )

    def check_alike(self, name: str, fingerprint: Fingerprint) -> None:
        """Raise unless a fingerprint was made as all others of the zoo."""
        if fingerprint.probe != self.probe:
            raise ValueError(
                f"{name!r}: a fingerprint on another probe set, {fingerprint.probe}; that of the zoo is {self.probe}: "
                "make it with zoo.fingerprint(model), or `sosie zoo fingerprint FOLDER MODEL --out FILE`"
            )
        for setting in MADE:
            if (actual := getattr(fingerprint, setting)) != (pinned := getattr(self, setting)):
                raise ValueError(f"{name!r}: a fingerprint with {setting}={actual!r}; the zoo has {setting}={pinned!r}")

    def record(self, name: str, fingerprint: Fingerprint, facts: Facts, added: str = "") -> Record:
        """Return what the store keeps of a fingerprint; raise unless it was made as all others of the zoo."""
        self.check_alike(name, fingerprint)
        keys = [key for key in fingerprint.vectors if kind_of(key) in self.kinds]
        if not keys:
            kinds = ", ".join(self.kinds)
            raise ValueError(f"{name!r}: a fingerprint of {', '.join(fingerprint.kinds)}; the zoo has {kinds}")
        blocks = {key: (fingerprint.vectors[key], tuple(fingerprint.labels[key])) for key in keys}
        if fingerprint.exact is not None and "cka" in blocks:
            blocks[EXACT] = fingerprint.exact, tuple(fingerprint.labels["cka"])
        digest, architecture = (str(fingerprint.about.get(key) or "unknown") for key in ("model", "architecture"))
        return Record(
            name=name, digest=digest, architecture=architecture, parameters=fingerprint.about.get("parameters", 0),
            blocks=blocks, absent=dict(fingerprint.absent), about=dict(fingerprint.about), added=added, **vars(facts),
        )  # fmt: skip

    def fingerprint(self, stored: Record) -> Fingerprint:
        """Return the fingerprint of a record."""
        vectors = {key: rows for key, (rows, _) in stored.blocks.items()}
        labels = {key: sites for key, (_, sites) in stored.blocks.items() if key != EXACT}
        exact = vectors.pop(EXACT, None)
        made = self.probe, self.n, self.size, self.seed, self.rows
        return Fingerprint(*made, vectors, labels, exact, dict(stored.absent), dict(stored.about))
