"""What two models are made of, tensor by tensor: files are read in pieces, so memory does not grow with the models."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..capture.sites import named_parameters, unwrap
from ..checks import listed
from ..engine.provenance import provenance
from ..files import CODES, DamagedFile, check_hash, check_schema
from ..linalg.products import eigen, eigenvalues, orthonormal, singular
from ..models import open_model
from ..models.weights import PICKLE_SUFFIXES, TORCH_SUFFIXES, WHY_NO_PICKLE, read_weights
from ..process_state import products
from ..progress import Progress
from ..results import counted
from ..results.diff import Diff, TensorDiff

PIECE = 2**18  # entries read at a time
SAMPLED = 1024  # entries by which tensors of other names are recognised
INDEX = ".safetensors.index.json"
COUNTER = "num_batches_tracked"  # of batch norm: may be missing, since outputs do not depend on it

Source: TypeAlias = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Reader: TypeAlias = Callable[[int, int], Tensor]  # (start, stop) -> these entries, flat, on the CPU


@products()
def diff_weights(a: Source, b: Source, *, names: tuple[str | None, str | None] = (None, None)) -> Diff:
    """Compare the weights of two models tensor by tensor, without data: what is equal, what changed, by how much.

    `a`, `b`: folders of safetensors with shards and an index, or with one file; files of weights; modules, state dicts
    or model specifications. Files of safetensors are read in pieces of a few MiB, once. Pruned and parametrised weights
    are compared as they are computed; buffers count too, those that are not saved only between two modules.

    Tensors are paired by name, else without a common prefix ("model."), else by content: equal or nearly equal numbers
    of the same shape, where no other tensor comes near. A name that is missing on one side because its tensor is tied
    to another is no difference. `same` is True if all tensors are equal, number for number, whatever their types and
    names. Each row has the relative change ‖a − b‖ / ‖a‖ (None where it is undefined: another shape, NaN), the largest
    change with its place, and of matrices the effective rank of the change, (Σ σ²)² / Σ σ⁴ of its singular values, from
    sampled rows; `low_rank` is its rank, if that is low and nothing but the rounding of the type is left, and rounding
    cannot hide a further direction; where it can, a note says "rank 7 or more".
    """
    both_modules = isinstance(a, nn.Module) and isinstance(b, nn.Module)
    side_a, side_b = (open_weights(side, name, unsaved=both_modules) for side, name in zip((a, b), names, strict=True))
    if side_a.name == side_b.name:
        side_a, side_b = (replace(side, name=f"{side.name} ({x})") for side, x in ((side_a, "A"), (side_b, "B")))
    pairings = pair_tensors(side_a, side_b)
    _keep_freed_memory()
    rows = []
    with Progress(f"comparing the weights of {side_a.name} and {side_b.name}", len(pairings), "tensors") as bar:
        for pairing in pairings:
            rows.append(_row(pairing, side_a, side_b))
            bar.advance()
    rows.sort(key=lambda row: (_is_same(row), -math.inf if row.change is None else -row.change))
    return Diff(
        side_a.name,
        side_b.name,
        same=all(map(_is_same, rows)),
        verdict=_verdict(rows),
        weights=tuple(rows),
        caveats=(*side_a.caveats, *side_b.caveats),
        provenance=provenance(models=[side_a.describe(), side_b.describe()]),
    )


# The tensors of a model, opened without reading their numbers


@dataclass(frozen=True)
class OpenTensor:
    """A tensor's shape and type, and a function that reads some of its entries."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch calls it; of a type that torch lacks, the code of safetensors
    read: Reader

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> torch.dtype | None:
        """None for types that torch lacks: their bytes alone can be compared."""
        return getattr(torch, self.dtype, None)


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name, those of tied weights under each of their names."""

    name: str
    tensors: dict[str, OpenTensor]
    ties: dict[str, str] = field(default_factory=dict)  # a further name of a tensor -> its first name
    caveats: tuple[str, ...] = ()

    def describe(self) -> str:
        own = [tensor for name, tensor in self.tensors.items() if name not in self.ties]
        return f"{self.name}: {len(own)} tensors, {sum(tensor.count for tensor in own):,} numbers"


def open_weights(source: Source, name: str | None = None, *, unsaved: bool = False) -> Weights:
    """Open a folder, a file, a module, a state dict or a model specification; `unsaved`: also buffers outside it."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.name.endswith(".index.json") or (not path.exists() and str(source).startswith("hf:")):
            path = path.parent if path.is_file() else Path(str(source).removeprefix("hf:"))
        if path.is_dir():
            return _of_folder(path, name or path.name or str(path))
        if path.suffix.lower() == ".safetensors" and ("@" not in str(source) or path.is_file()):
            return _of_files({path: None}, name or path.name)
        if path.is_file() and path.suffix.lower() in (*TORCH_SUFFIXES, *PICKLE_SUFFIXES):
            return _of_state(read_weights(path)[0], name or path.name)
        opened = open_model(str(source))
        return _of_module(opened.model, name or opened.name, unsaved=unsaved)
    if isinstance(source, nn.Module):
        return _of_module(source, name or type(source).__name__, unsaved=unsaved)
    if isinstance(source, Mapping):
        return _of_state(source, name or "state dict")
    raise TypeError(
        f"need a folder of safetensors, a file of weights, a module or a state dict, got {type(source).__name__}"
    )


def _of_module(model: nn.Module, name: str, *, unsaved: bool) -> Weights:
    plain = unwrap(model)
    saved, computed = plain.state_dict(keep_vars=True), named_parameters(plain)
    sources = {key for key, _ in plain.named_parameters()} - computed.keys()  # weight_orig, parametrizations.…
    tensors: dict[str, Tensor] = dict(computed)
    ties, first = {}, {id(tensor): key for key, tensor in plain.named_parameters()}
    for key, tensor in plain.named_parameters(remove_duplicate=False):
        if first[id(tensor)] != key and first[id(tensor)] in computed:
            tensors[key], ties[key] = tensor, first[id(tensor)]
    behind = {f"{key.removesuffix('_orig')}_mask" for key in sources}
    for key, buffer in plain.named_buffers():
        if key not in behind and ".parametrizations." not in f".{key}" and (unsaved or key in saved):
            tensors[key] = buffer
    return _checked(name, {key: _of_tensor(key, tensor) for key, tensor in tensors.items()}, ties)


def _of_state(state: Mapping[str, Tensor], name: str) -> Weights:
    others = [f"{key} ({type(value).__name__})" for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"{name} is not a state dict; these entries are not tensors: {listed(others)}")
    places: dict[object, str] = {}
    ties = {}
    for key, tensor in state.items():
        if tensor.layout == torch.strided and tensor.numel() and tensor.device.type != "meta":
            place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if places.setdefault(place, key) != key:
                ties[key] = places[place]
    return _checked(name, _masked({key: _of_tensor(key, tensor) for key, tensor in state.items()}), ties)


def _of_tensor(name: str, tensor: Tensor) -> OpenTensor:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, without numbers: load the weights first")
    tensor = tensor.detach()
    if tensor.is_quantized or (type(tensor) is not Tensor and hasattr(type(tensor), "dequantize")):
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()

    def read(start: int, stop: int) -> Tensor:
        return tensor.reshape(-1)[start:stop].cpu()

    return OpenTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), read)


def _masked(tensors: dict[str, OpenTensor]) -> dict[str, OpenTensor]:
    """Apply the masks of sparse models: `weight_mask` beside `weight` (sosie's) or `weight_orig` (torch's pruning)."""
    result = dict(tensors)
    for key, mask in tensors.items():
        plain = key.removesuffix("_mask")
        source = tensors.get(f"{plain}_orig", tensors.get(plain))
        if plain != key and source is not None and source.shape == mask.shape:
            del result[key], result[source.name]
            result[plain] = replace(source, name=plain, read=_masking(source.read, mask.read))
    return result


def _masking(source: Reader, mask: Reader) -> Reader:
    return lambda start, stop: torch.where(mask(start, stop) != 0, source(start, stop), 0)


def _checked(
    name: str, tensors: dict[str, OpenTensor], ties: Mapping[str, str], caveats: Iterable[str] = ()
) -> Weights:
    if not tensors:
        raise ValueError(f"{name} holds no tensors")
    return Weights(name, tensors, {key: first for key, first in ties.items() if key in tensors}, tuple(caveats))


# Folders and files of safetensors


def _of_folder(folder: Path, name: str) -> Weights:
    files = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob(f"*{INDEX}"))
    whole = folder / "model.safetensors"
    if not files and not indices:
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in (*PICKLE_SUFFIXES, *TORCH_SUFFIXES))
        content = f", but {listed(pickles)}: {WHY_NO_PICKLE}" if pickles else ""
        raise FileNotFoundError(f"{folder} has no .safetensors file{content}")
    if whole in files:  # what transformers reads first
        wanted: dict[Path, list[str] | None] = {whole: None}
    elif len(indices) == 1:
        wanted = _indexed(indices[0])
    elif len(files) == 1 and not indices and not _is_one_of_several(files[0]):
        wanted = {files[0]: None}
    else:
        have = f"{len(indices)} indices" if indices else f"{counted(len(files), 'safetensors file')} and no index"
        raise ValueError(
            f"{folder} has {have} ({listed(f.name for f in indices or files)}), so that it is unknown which belong "
            f"together: name one file, or add model{INDEX}"
        )
    unread = [file.name for file in files if file not in wanted]
    return _of_files(wanted, name, [f"{name}: {listed(unread)} not read"] if unread else [])


def _is_one_of_several(file: Path) -> bool:
    """Whether this is a shard by its name, model-00001-of-00002.safetensors."""
    shards = re.search(r"-of-(\d+)$", file.stem)
    return shards is not None and int(shards[1]) > 1


def _indexed(path: Path) -> dict[Path, list[str] | None]:
    """The names of the tensors in each shard, from an index; files outside its folder are refused."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not whole JSON ({str(error)[:80]})") from error
    check_schema(path, content, {"weight_map": {str: str}})
    shards: dict[Path, list[str]] = defaultdict(list)
    for key, file in content["weight_map"].items():
        if Path(file).name != file or "\\" in file or Path(file).suffix != ".safetensors":
            raise DamagedFile(
                f"{path} names {file[:80]!r} for {key[:80]!r}: shards are .safetensors files beside the index"
            )
        shards[path.parent / file].append(key)
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(shards)} shards that {path} names are missing: {listed(missing)}"
        )
    return dict(shards)


def _of_files(wanted: Mapping[Path, list[str] | None], name: str, caveats: Sequence[str] = ()) -> Weights:
    """The tensors of shards, each with the names that the index says it holds; None: all."""
    tensors: dict[str, OpenTensor] = {}
    beside = []
    for path, keys in wanted.items():
        held = _of_shard(path)
        if lost := [key for key in keys or () if key not in held]:
            raise DamagedFile(f"{path} does not hold what the index says: {listed(lost)} missing")
        tensors |= held if keys is None else {key: held[key] for key in keys}
        beside += [key for key in held if keys is not None and key not in keys]
    if beside := [key for key in beside if key not in tensors]:
        caveats = [*caveats, f"{name}: {listed(beside)} in the shards, but not in the index: not read"]
    return _checked(name, _masked(tensors), {}, caveats)


def _of_shard(path: Path) -> dict[str, OpenTensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no weights file {path}")
    try:
        with safe_open(path, framework="pt") as file:  # checks the header: sizes, overlaps, the end of the file
            about = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise DamagedFile(
            f"{path} ({size:,} bytes) is not a whole safetensors file ({error}); was it cut off?"
        ) from error
    if about.get("format", "").startswith("sosie-"):
        raise ValueError(f"{path} holds a sosie {about['format'].removeprefix('sosie-')}, not weights")
    check_hash(path, about)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
    head.pop("__metadata__", None)
    ordered = sorted(head.items(), key=lambda item: item[1]["data_offsets"])
    return {key: _of_entry(path, key, entry, 8 + length) for key, entry in ordered}


_TYPES = {code: name for name, code in CODES.items()} | {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz"}


def _of_entry(path: Path, name: str, entry: Mapping[str, Any], start: int) -> OpenTensor:
    first, last = (start + offset for offset in entry["data_offsets"])
    shape, dtype = tuple(entry["shape"]), _TYPES.get(entry["dtype"], entry["dtype"])
    known = getattr(torch, dtype, None)
    size = known.itemsize if known else 1

    def read(begin: int, end: int) -> Tensor:
        numbers = torch.empty((end - begin) * size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(first + begin * size)
            if file.readinto(numbers.numpy().data) < len(numbers):
                raise DamagedFile(f"{path} became shorter while it was read")
        return numbers if known is None else numbers.view(known)

    # Bytes stand for the entries of types that torch lacks.
    return OpenTensor(name, shape if known else (last - first,), dtype, read)


# Which tensor belongs to which


@dataclass(frozen=True)
class Pairing:
    """The names of a tensor in A and in B; None where it is missing."""

    a: str | None
    b: str | None
    notes: tuple[str, ...] = ()
    copy: bool = False  # whether one of them is paired already: a tied tensor, if their numbers are equal


def pair_tensors(a: Weights, b: Weights) -> list[Pairing]:
    """Which tensor of A belongs to which of B, in the order of A."""
    to_b = {name: name for name in a.tensors if name in b.tensors}

    def left() -> tuple[list[str], list[str]]:
        return _left(a, to_b.keys()), _left(b, to_b.values())

    to_b |= _by_prefix(*left())
    left_a, left_b = left()
    renamed = _by_content(_sampled(a, left_a), _sampled(b, left_b)) if left_a and left_b else {}
    to_b |= renamed
    pairings = []
    for name_a, name_b in to_b.items():
        first_a, first_b = a.ties.get(name_a), b.ties.get(name_b)
        if first_a in to_b and to_b[first_a] == (first_b or name_b):
            continue  # a further name of tensors that are compared anyway
        notes = ["renamed"] if name_a in renamed else []
        if (first_a is None) != (first_b is None):
            notes.append(f"tied to {first_a or first_b} in {'A' if first_a else 'B'} alone")
        pairings.append(Pairing(name_a, name_b, tuple(notes)))
    # Safetensors leaves out tied tensors, but one side may hold their numbers twice.
    left_a, left_b = left()
    copies = _copies(_sampled(a, left_a), _sampled(b, to_b.values() if left_a else ()))
    pairings += [Pairing(name, copies.get(name), copy=name in copies) for name in left_a]
    copies = _copies(_sampled(b, left_b), _sampled(a, to_b if left_b else ()))
    pairings += [Pairing(copies.get(name), name, copy=name in copies) for name in left_b]
    order = {name: k for k, name in enumerate(a.tensors)}
    return sorted(pairings, key=lambda pairing: order.get(pairing.a or "", len(order)))


def _left(side: Weights, taken: Iterable[str]) -> list[str]:
    """The names that are not taken, nor is another name of the same tensor."""
    names = set(taken)
    firsts = {side.ties.get(name, name) for name in names}
    return [name for name in side.tensors if name not in names and side.ties.get(name, name) not in firsts]


def _by_prefix(left_a: Sequence[str], left_b: Sequence[str]) -> dict[str, str]:
    """Names that are the same without a prefix of one side, if it is common to at least half of those left."""

    def stripped(longer: Sequence[str], shorter: Sequence[str]) -> dict[str, str]:
        """{name with prefix: name without}, for the most frequent prefix."""
        known = set(shorter)
        counts: Counter[str] = Counter()
        for name in longer:
            parts = name.split(".")
            counts.update(".".join(parts[:k]) + "." for k in range(1, len(parts)) if ".".join(parts[k:]) in known)
        ((prefix, count),) = counts.most_common(1) or [("", 0)]
        if 2 * count < min(len(longer), len(shorter)) or not count:
            return {}
        rests = {name: name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
        return {name: rest for name, rest in rests.items() if rest in known}

    of_a, of_b = stripped(left_a, left_b), stripped(left_b, left_a)
    return of_a if len(of_a) >= len(of_b) else {name_a: name_b for name_b, name_a in of_b.items()}


@dataclass(frozen=True)
class SampledEntries:
    """A few entries of a tensor, by which it is recognised under another name."""

    shape: tuple[int, ...]
    numbers: Tensor  # float64

    @property
    def is_constant(self) -> bool:
        return not len(self.numbers) or bool((self.numbers == self.numbers[0]).all())

    def key(self) -> tuple[tuple[int, ...], bytes]:
        return self.shape, self.numbers.numpy().tobytes()


def _sampled(side: Weights, names: Iterable[str]) -> dict[str, SampledEntries]:
    sampled = {}
    for name in names:
        tensor = side.tensors[name]
        if tensor.type is None or tensor.name.endswith(COUNTER):
            continue
        run, count = SAMPLED // 16, tensor.count
        starts = [0] if count <= SAMPLED else [k * (count - run) // 15 for k in range(16)]
        runs = [tensor.read(start, min(count, start + (SAMPLED if count <= SAMPLED else run))) for start in starts]
        sampled[name] = SampledEntries(tensor.shape, torch.nan_to_num(_double(torch.cat(runs))))
    return sampled


def _by_content(a: Mapping[str, SampledEntries], b: Mapping[str, SampledEntries]) -> dict[str, str]:
    """Tensors of the same shape and numbers; then of nearly the same numbers, where no other comes near."""
    pairs: dict[str, str] = {}
    waiting: defaultdict[object, list[str]] = defaultdict(list)
    for name, entries in b.items():
        waiting[entries.key()].append(name)
    for name, entries in a.items():
        if equal := waiting[entries.key()]:
            pairs[name] = equal.pop(0)  # any of them gives the same numbers
    taken = set(pairs.values())
    for shape in dict.fromkeys(entries.shape for entries in a.values()):
        rows = [name for name, e in a.items() if e.shape == shape and name not in pairs and not e.is_constant]
        columns = [name for name, e in b.items() if e.shape == shape and name not in taken and not e.is_constant]
        if not rows or not columns:
            continue
        x, y = (torch.stack([s[name].numbers for name in some]) for s, some in ((a, rows), (b, columns)))
        distances = torch.cdist(x, y) / x.norm(dim=1, keepdim=True)
        near = (distances <= NEAR) & _far_ahead(distances) & _far_ahead(distances.T).T
        pairs |= {rows[i]: columns[j] for i, j in near.nonzero().tolist()}
    return pairs


NEAR = 0.5  # relative distance of tensors that may be one under two names; of independent ones it is about 1.4


def _far_ahead(distances: Tensor) -> Tensor:
    """The nearest of each row, where the next one is at least twice as far."""
    two = distances.topk(min(2, distances.shape[1]), dim=1, largest=False).values
    clear = two[:, -1] > 2 * two[:, 0] if two.shape[1] == 2 else torch.ones(len(two), dtype=torch.bool)
    return (distances == two[:, :1]) & clear[:, None]


def _copies(left: Mapping[str, SampledEntries], taken: Mapping[str, SampledEntries]) -> dict[str, str]:
    """Tensors whose numbers the other side has under a name that is paired already."""
    known = {entries.key(): name for name, entries in taken.items() if not entries.is_constant}
    return {name: known[entries.key()] for name, entries in left.items() if entries.key() in known}


# One pair of tensors


def _keep_freed_memory() -> None:
    """Have the allocator of Linux reuse freed pieces, rather than ask for new pages, which takes longer than reading.

    It raises its threshold for returning memory to the largest block that was freed, up to 32 MiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def _row(pairing: Pairing, side_a: Weights, side_b: Weights) -> TensorDiff:
    if pairing.a is None or pairing.b is None:
        name, side = (pairing.a, side_a) if pairing.b is None else (pairing.b, side_b)
        held = side.tensors[str(name)]
        types = (held.dtype if pairing.a else None, held.dtype if pairing.b else None)
        note = f"only in {'A' if pairing.a else 'B'}"
        return TensorDiff(pairing.a, pairing.b, held.shape, *types, equal=False, change=None, notes=(note,))
    row = _compared(side_a.tensors[pairing.a], side_b.tensors[pairing.b], pairing)
    if not pairing.copy:
        return row
    missing_in_b = pairing.a not in side_b.tensors
    if not row.equal:
        alone = replace(pairing, b=None) if missing_in_b else replace(pairing, a=None)
        return _row(alone, side_a, side_b)
    return replace(row, notes=(*row.notes, f"tied in {'B' if missing_in_b else 'A'}"))


def _compared(a: OpenTensor, b: OpenTensor, pairing: Pairing) -> TensorDiff:
    notes = list(pairing.notes)
    if a.dtype != b.dtype:
        notes.append(f"{a.dtype} in A, {b.dtype} in B")
    row = TensorDiff(pairing.a, pairing.b, a.shape, a.dtype, b.dtype, equal=False, change=None, notes=tuple(notes))
    if a.type is None or b.type is None:
        equal = a.dtype == b.dtype and a.shape == b.shape
        equal = equal and all(torch.equal(a.read(*span), b.read(*span)) for span in _spans(a.count, a.count))
        return replace(row, equal=equal, change=0.0 if equal else None, notes=(*notes, "compared byte by byte"))
    if a.shape != b.shape:
        return replace(row, notes=(*notes, f"shape {a.shape} in A, {b.shape} in B", *_common_part(a, b)))
    sums = _sum_up(a, b)
    if not sums.differs:
        bits = [] if sums.bits or a.dtype != b.dtype else [OTHER_BITS]
        return replace(row, equal=True, change=0.0, largest=0.0, notes=(*notes, *bits, *sums.both_nan(a.shape)))
    row = replace(row, notes=(*notes, *sums.notes(a, b)), at=sums.place(a.shape))
    if sums.odd:
        return row
    row = replace(row, change=sums.change, largest=sums.largest)
    return row if len(a.shape) != 2 else _with_spectrum(row, sums, a, b)


def _common_part(a: OpenTensor, b: OpenTensor) -> Iterator[str]:
    """What is said of tensors of other shapes: the rows that both have, or whether one is the other transposed."""
    if len(a.shape) == len(b.shape) == 2 and a.shape == b.shape[::-1]:
        if a.count <= WHOLE and torch.equal(_whole(a), _whole(b).T):
            yield "the same numbers, transposed"
    elif a.shape and b.shape and a.shape[1:] == b.shape[1:]:
        rows = min(a.shape[0], b.shape[0])
        sums = _sum_up(*(replace(side, shape=(rows, *side.shape[1:])) for side in (a, b)))
        what = "equal" if not sums.differs else "undefined" if sums.odd else f"different by {sums.change:.3g}"
        yield f"the first {rows:,}, which both have, are {what}"
    elif a.count == b.count:
        flat = _sum_up(*(replace(side, shape=(a.count,)) for side in (a, b)))
        if not flat.differs:
            yield "the same numbers in another shape"


@dataclass
class ChangeSums:
    """Sums over the entries of two tensors and their difference d = b − a."""

    aa: float = 0.0  # Σ a²
    bb: float = 0.0
    dd: float = 0.0
    largest: float = 0.0  # |d|
    at: int = 0  # where that is, flat; of an odd entry, the first
    changed: int = 0  # entries
    odd: dict[str, int] = field(default_factory=dict)  # entries that are NaN or infinite in one, or differently
    nan: int = 0  # entries that are NaN in both
    bits: bool = True  # whether all are equal, bit for bit
    rows: Tensor = field(default_factory=lambda: torch.zeros(0))  # (rows,) Σ d² of each

    @property
    def differs(self) -> bool:
        return bool(self.changed or self.odd)

    @property
    def change(self) -> float | None:
        return (self.dd / self.aa) ** 0.5 if self.aa else None

    def place(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(k) for k in torch.unravel_index(torch.tensor(self.at), shape)) if shape else ()

    def both_nan(self, shape: tuple[int, ...]) -> list[str]:
        return [f"NaN in both at the same {self.nan:,} of {math.prod(shape):,} entries"] if self.nan else []

    def notes(self, a: OpenTensor, b: OpenTensor) -> Iterator[str]:
        """What is to be said of the change, beside its size."""
        for what, count in self.odd.items():
            yield f"{what} at {count:,} of {a.count:,} entries"
        yield from self.both_nan(a.shape)
        if self.odd:
            return
        if not self.aa or not self.bb:
            yield f"0 everywhere in {'B' if self.aa else 'A'}"
            return
        if self.changed <= a.count * FEW:
            yield f"{self.changed:,} of {a.count:,} entries changed"
        elif len(a.shape) > 1 and (rows := int((self.rows > 0).sum())) <= a.shape[0] * FEW_ROWS:
            yield f"{rows:,} of {a.shape[0]:,} rows changed"
        fine = max(_step(a.type), _step(b.type))
        slope = (self.aa + self.bb - self.dd) / 2 / self.aa
        left = max(self.bb - slope * slope * self.aa, 0.0) / self.bb
        if a.count > 1 and abs(slope - 1) > 8 * fine and left**0.5 <= max(fine, 1e-5):  # sums are of float32 numbers
            yield "A with the other sign" if abs(slope + 1) <= fine else f"A, scaled by {slope:.6g}"
        elif self.largest and self.dd <= self.bb * fine**2 / 3 and fine > _step(torch.float32):
            coarse = a.dtype if _step(a.type) >= _step(b.type) else b.dtype
            yield ROUNDING.format(coarse)


OTHER_BITS = "not bit for bit: the signs of zeros differ, or the bits of NaN"
ROUNDING = "no more than the rounding of {}"
FEW, FEW_ROWS = 0.01, 0.5  # shares of entries and rows up to which their number is said


def _step(dtype: torch.dtype | None) -> float:
    """Half the relative step between numbers of a type: the most by which rounding changes one."""
    return torch.finfo(dtype).eps / 2 if dtype is not None and dtype.is_floating_point else 0.0


def _spans(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Flat spans of whole rows, or of parts of a row that is too wide."""
    step = PIECE // width * width if 0 < width <= PIECE else PIECE
    if width <= PIECE:
        yield from ((start, min(start + step, count)) for start in range(0, count, step))
        return
    for row in range(0, count, width):
        yield from ((start, min(start + step, row + width)) for start in range(row, row + width, step))


def _sum_up(a: OpenTensor, b: OpenTensor) -> ChangeSums:
    """Read both once, piece by piece; a piece that is equal bit for bit is only added up if another one differs."""
    rows = a.shape[0] if len(a.shape) > 1 else 1
    width = a.count // max(rows, 1)
    sums = ChangeSums(rows=torch.zeros(rows, dtype=torch.float64))
    equal = []
    for span in _spans(a.count, width):
        x, y = a.read(*span), b.read(*span)
        if a.dtype == b.dtype and _same_bits(x, y) and not _has_nan(x):
            equal.append(span)
            continue
        sums.bits = False
        _add(sums, x, y, span[0], width)
    if sums.differs:
        for span in equal:
            squares = float(_square_sums(_widened(a.read(*span)).view(-1, min(width, span[1] - span[0]))).sum())
            sums.aa, sums.bb = sums.aa + squares, sums.bb + squares
    elif sums.nan and not sums.bits:
        sums.bits = all(
            a.dtype == b.dtype and _same_bits(a.read(*span), b.read(*span)) for span in _spans(a.count, width)
        )
    return sums


def _same_bits(x: Tensor, y: Tensor) -> bool:
    size = x.numel() * x.element_size()
    wide = torch.int64 if size % 8 == 0 and not (x.data_ptr() | y.data_ptr()) % 8 else torch.uint8
    return torch.equal(x.contiguous().view(wide), y.contiguous().view(wide))


def _has_nan(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return False
    x = torch.view_as_real(x) if x.is_complex() else x
    low, high = torch.aminmax(x if x.element_size() > 1 else x.float())
    return bool(low.isnan() | high.isnan())


def _widened(x: Tensor) -> Tensor:
    """As numbers to calculate with: float32 where their differences have few digits anyway."""
    if x.is_complex():
        return _double(x)
    return x.float() if x.element_size() <= 2 or x.dtype == torch.float32 else x.double()


def _double(x: Tensor) -> Tensor:
    return torch.view_as_real(x).double().norm(dim=-1) if x.is_complex() else x.double()


def _square_sums(rows: Tensor) -> Tensor:
    """(n,) float64: Σ of squares of each row."""
    sums = torch.linalg.vecdot(rows, rows).double()
    # Numbers may be too large or too small to be squared in float32.
    if rows.dtype == torch.float32 and bool((again := ~((sums > 1e-30) & (sums < 1e37))).any()):
        sums[again] = rows[again].double().square().sum(1)
    return sums


def _add(sums: ChangeSums, x: Tensor, y: Tensor, start: int, width: int) -> None:
    """Add a span: whole rows, or a part of one row."""
    x, y, d, changed = _differences(x, y)
    low, high = (float(edge) for edge in torch.aminmax(d))
    if not math.isfinite(low) or not math.isfinite(high):
        x, y, d, changed = _without_odd(sums, x.double(), y.double(), start)
        low, high = (float(edge) for edge in torch.aminmax(d))
    sums.changed += int(changed.sum())
    if (largest := max(-low, high)) > sums.largest:
        sums.largest = largest
        sums.at = sums.at if sums.odd else start + int(d.abs().argmax())
    shape = (-1, min(width, len(d)))
    by_row = _square_sums(d.view(shape))
    first = start // width
    sums.rows[first : first + len(by_row)] += by_row
    sums.dd += float(by_row.sum())
    sums.aa += float(_square_sums(x.reshape(shape)).sum())
    sums.bb += float(_square_sums(y.reshape(shape)).sum())


def _differences(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers of both sides to calculate with, b − a, and where they differ."""
    if x.is_complex() or y.is_complex():
        x, y = x.to(torch.complex128), y.to(torch.complex128)
        return x.abs(), y.abs(), (y - x).abs(), x != y
    if not x.is_floating_point() and not y.is_floating_point():
        apart = y.long() - x.long()  # float64 has fewer digits
        x, y = x.double(), y.double()
        d = torch.where((y - x).abs() < 2.0**62, apart.double(), y - x)  # of larger ones the difference overflows
        return x, y, d, d != 0
    x, y = _widened(x), _widened(y)
    if x.dtype != y.dtype:
        x, y = x.double(), y.double()
    d = y - x
    return x, y, d, d != 0


def _without_odd(sums: ChangeSums, x: Tensor, y: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count entries that are NaN or infinite, and set them to 0."""
    nan_x, nan_y = x.isnan(), y.isnan()
    odd = ~(x.isfinite() & y.isfinite()) & (x != y) & ~(nan_x & nan_y)
    kinds = {
        "NaN in A alone": odd & nan_x,
        "NaN in B alone": odd & nan_y,
        "infinite in A alone": odd & x.isinf() & y.isfinite(),
        "infinite in B alone": odd & y.isinf() & x.isfinite(),
        "infinite with other signs": odd & x.isinf() & y.isinf(),
    }
    if bool(odd.any()) and not sums.odd:
        sums.at = start + int(odd.nonzero()[0])
    for what, where in kinds.items():
        if count := int(where.sum()):
            sums.odd[what] = sums.odd.get(what, 0) + count
    sums.nan += int((nan_x & nan_y).sum())
    finite = x.isfinite() & y.isfinite()
    x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    return x, y, y - x, x != y


# The spectrum of a changed matrix
#
# Rows of the change are drawn in proportion to their squared lengths w, so that R, with row i divided by √(draws pᵢ),
# has RᵀR equal to DᵀD on average (Frieze, Kannan and Vempala, 2004, Journal of the ACM 51), and rows that did not
# change are never drawn. Σ σ⁴ is Σ wᵢ² + Σ wᵢ wⱼ cos²: the first is known, the second a mean over pairs of draws.

DRAWN = (128, 512)  # rows that are drawn; more only where the rank may be low
LOW = 0.25  # of full rank, above which a rank is not low
SLACK = 2.0  # times the rounding that a type explains, for weights that were merged in several steps
CHANCE = 1.1  # times its energy, by which that of a few rows differs from that of all
# Times what rounding reaches, beyond which a direction is none of it; σₖ that fall as 1 / k² have no such gap.
GAP = 4.0
BESIDE = 16  # directions that are looked at beside those that may be found
WHOLE = 2**26  # entries of a matrix that may be held whole
ROUNDED = 32  # rows by which rounding is judged
TINY = 1e-12  # share of the largest σ², below which they are rounding in products of float64
MOVED = 0.5  # relative change above which a matrix may hold the same numbers in another order


def _with_spectrum(row: TensorDiff, sums: ChangeSums, a: OpenTensor, b: OpenTensor) -> TensorDiff:
    """Add the effective rank of the change, its rank where that is low, and whether numbers only moved."""
    if (row.change is None or row.change > MOVED) and a.count <= WHOLE and (moved := _moved(a, b)):
        return replace(row, notes=(*row.notes, moved))
    if min(a.shape) < 2 or not math.isfinite(sums.dd):
        return row
    change = _Change(a, b, sums.rows)
    picked = change.draw(DRAWN[0])
    rows = change.rows(picked)
    row = replace(row, rank=change.effective_rank(picked, rows))
    assert row.rank is not None
    for draws in DRAWN:
        if row.rank > min(draws / 2, LOW * min(a.shape)):  # no rank is below the effective one
            continue
        if draws > len(rows):
            picked = change.draw(draws)
            rows = change.rows(picked)
        if found := change.low_rank(picked, rows):
            low, exact = found
            words = f"rank {low} of {min(a.shape):,}" + (", as a LoRA" if exact else f" or more: {FROM_ROUNDING}")
            notes = (*row.notes, words) if low > 1 else row.notes
            return replace(row, low_rank=low if exact else None, notes=notes)
    return row


FROM_ROUNDING = "smaller directions cannot be told from rounding"


def _whole(tensor: OpenTensor) -> Tensor:
    return tensor.read(0, tensor.count).reshape(tensor.shape)


def _moved(a: OpenTensor, b: OpenTensor) -> str | None:
    """Whether B holds A's numbers transposed, or with its rows or columns in another order."""
    x, y = _widened(_whole(a)), _widened(_whole(b))
    if a.shape[0] == a.shape[1] and torch.equal(x, y.T):
        return "the same numbers, transposed"
    for what, p, q in (("rows", x, y), ("columns", x.T, y.T)):
        keys = torch.randn(p.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        orders = [torch.cat([(some.double() @ keys) for some in side.split(1024)]).argsort() for side in (p, q)]
        if all(torch.equal(p[i], q[j]) for i, j in zip(*(order.split(1024) for order in orders), strict=True)):
            return f"the same {what} in another order"
    return None


@dataclass(frozen=True)
class _Change:
    """The change D = B − A of a matrix, of which rows are read as they are needed."""

    a: OpenTensor
    b: OpenTensor
    squares: Tensor  # (n,) Σ d² of each row

    @property
    def total(self) -> float:
        return float(self.squares.sum())

    def draw(self, draws: int) -> Tensor:
        """The rows that are drawn; all of them if there are no more."""
        if self.a.shape[0] <= draws:
            return torch.arange(self.a.shape[0])
        generator = torch.Generator().manual_seed(0)
        edges = (self.squares / self.total).cumsum(0)
        return torch.searchsorted(edges, torch.rand(draws, dtype=torch.float64, generator=generator) * edges[-1])

    def rows(self, picked: Tensor) -> Tensor:
        """(drawn, p) float64: rows of D."""
        a, b = self._both(picked)
        return b - a

    def _both(self, picked: Tensor) -> list[Tensor]:
        width = self.a.shape[1]
        readers = self.a.read, self.b.read
        return [torch.stack([_double(read(i * width, (i + 1) * width)) for i in picked.tolist()]) for read in readers]

    def _rounding(self, picked: Tensor) -> Tensor:
        """(rows,) The mean variance of the rounding of an entry of D, from the types of both sides."""
        sides = zip(self._both(picked), (self.a, self.b), strict=True)
        return sum((_rounding(side, held.type).mean(1) for side, held in sides), torch.zeros(()))

    def _weights(self, picked: Tensor) -> Tensor:
        """(drawn,) What each drawn row is multiplied by."""
        if len(picked) == self.a.shape[0]:
            return torch.ones(len(picked), dtype=torch.float64)
        return (self.total / (len(picked) * self.squares[picked])).sqrt()

    def effective_rank(self, picked: Tensor, d: Tensor) -> float:
        """(Σ σ²)² / Σ σ⁴: the number of directions, if all were equally long."""
        if len(picked) == self.a.shape[0]:
            return self.total**2 / float((d @ d.T).square().sum())
        unit = d / d.norm(dim=1, keepdim=True)
        others = picked[:, None] != picked[None, :]
        pairs = len(picked) * (len(picked) - 1)
        between = float(((unit @ unit.T).square() * others).sum()) / pairs
        return 1 / (float(self.squares.square().sum()) / self.total**2 + between)

    def low_rank(self, picked: Tensor, d: Tensor) -> tuple[int, bool] | None:
        """The number of directions beyond rounding, if they are few, and whether rounding hides no further ones.

        None if what is outside these directions is more than rounding.
        """
        d = d * self._weights(picked)[:, None]
        rounding = self._rounding(torch.linspace(0, self.a.shape[0] - 1, ROUNDED).long())
        step = float(rounding.mean()) ** 0.5
        most = int(min(LOW * min(self.a.shape), len(d) / 2))
        # A part of the columns has no higher rank, and shows sooner that it is not low.
        some = d[:, torch.randperm(d.shape[1], generator=torch.Generator().manual_seed(0))[: len(d)]]
        noise = step * (len(d) ** 0.5 + d.shape[1] ** 0.5)
        if int((eigenvalues(some @ some.T) > (2 * SLACK * noise) ** 2).sum()) > most or not most:
            return None
        values, vectors = eigen(d @ d.T)
        taken = min(most, 2 * int((values > max(noise**2, TINY * float(values[-1]))).sum())) + BESIDE
        sizes, edges, rest = self._directions(orthonormal(d.T @ vectors[:, -taken:])[0])
        count = len(sizes)
        while count and sizes[count - 1] <= edges[count]:  # its own rest is what a direction must stand out of
            count -= 1
        clear = int((sizes[:count] > GAP * edges[count]).sum())
        explained = float(rounding.mean()) * self.a.count + TINY * self.total
        if not 0 < clear <= count <= most or rest[count] > SLACK**2 * explained:
            return None
        return clear, clear == count and float(rest[count]) <= CHANCE * explained

    def _directions(self, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the part of D near a basis (p, k): its singular values σ, descending; then, for the k + 1 numbers of them
        that may be taken away, the largest singular value that noise as large as the rest can have, and Σ of squares of
        the rest.
        """
        width = self.a.shape[1]
        step = max(1, PIECE // width) * width  # of whole rows
        spans = [(start, min(start + step, self.a.count)) for start in range(0, self.a.count, step)]
        columns, right = (torch.zeros(*shape, dtype=torch.float64) for shape in ((width,), (basis.shape[1], width)))
        left, by_row = [], []
        for span in spans:
            d = self._between(*span)
            left.append(d @ basis)
            by_row.append(d.square().sum(1))  # in float64, which `squares` is not
            columns += d.square().sum(0)
        q, start = orthonormal(torch.cat(left))[0], 0
        for span in spans:
            d = self._between(*span)
            right += q[start : start + len(d)].T @ d
            start += len(d)
        u, sizes, v = singular(right)
        taken = sizes.square().cumsum(0)
        # What is left of a sum from which all of it was taken may be rounding below 0, here and in `norms`.
        rest = (columns.sum() - torch.cat([taken.new_zeros(1), taken])).clamp(min=0)
        edges = torch.zeros(len(sizes) + 1, dtype=torch.float64)
        # ‖noise‖ of independent entries is at most about the largest norm of a row and of a column together (Bandeira
        # and van Handel, 2016, Annals of Probability 44): where all are equal, the edge of Marchenko and Pastur.
        rows, own, other = torch.cat(by_row), (q @ u) * sizes, v.T * sizes
        for k in range(len(edges)):
            # Taking k directions away leaves a row of noise 1 − k / length of its energy: beyond half, no fair guess.
            edges[k] = sum(
                (norms.max().clamp(min=0) / max(1 - k / len(held), 0.5)).sqrt()
                for norms, held in ((rows, columns), (columns, rows))
            )
            if k < len(sizes):
                rows, columns = rows - own[:, k].square(), columns - other[:, k].square()
        # σ as small as this beside the first are rounding of float64 sums, even where D has no other.
        return sizes, edges.clamp(min=TINY**0.5 * float(sizes[0])), rest

    def _between(self, start: int, stop: int) -> Tensor:
        """(rows, p) float64: a span of whole rows of D."""
        return (_double(self.b.read(start, stop)) - _double(self.a.read(start, stop))).view(-1, self.a.shape[1])


def _rounding(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The variance of the rounding of each number to its type: a twelfth of the squared step."""
    if dtype is None or not dtype.is_floating_point:
        return torch.zeros_like(x)
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, torch.finfo(dtype).eps / 2), exponent.to(x)).square() / 12


# The result in words


def _is_same(row: TensorDiff) -> bool:
    return row.equal or (None in (row.name_a, row.name_b) and str(row.name_a or row.name_b).endswith(COUNTER))


def _verdict(rows: Sequence[TensorDiff]) -> str:
    """One sentence."""
    compared = [row for row in rows if row.name_a is not None and row.name_b is not None]
    changed = [row for row in compared if not row.equal]
    count = f"{len(compared):,} tensor{'s' * (len(compared) != 1)}"
    details = []
    if renamed := sum(row.name_a != row.name_b for row in compared):
        details.append(f"{renamed:,} {'has' if renamed == 1 else 'have'} another name")
    if retyped := [row for row in compared if row.dtype_a != row.dtype_b]:
        types = Counter(f"{row.dtype_a} in A, {row.dtype_b} in B" for row in retyped).most_common(1)[0][0]
        details.append(f"{len(retyped):,} have another type ({types})")
    if not compared:
        return "Different: no tensor of A has a counterpart in B."
    if all(map(_is_same, rows)):
        how = "number for number" if retyped or any(OTHER_BITS in row.notes for row in rows) else "bit for bit"
        every = f"all {count} are" if len(compared) > 1 else "the only tensor is"
        return f"The same: {'; '.join([f'{every} equal, {how}', *details])}."
    for side, missing in (("A", "name_b"), ("B", "name_a")):
        if alone := [row for row in rows if getattr(row, missing) is None and not _is_same(row)]:
            details.append(f"{len(alone):,} {'is' if len(alone) == 1 else 'are'} only in {side}")
    if ranks := sorted({row.low_rank for row in changed if row.low_rank and row.low_rank > 1}):
        low = sum((row.low_rank or 0) > 1 for row in changed)
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        details.append(f"{low:,} changed by a matrix of rank {span}, as a LoRA does")
    if some := sum(note.endswith(FROM_ROUNDING) for row in changed for note in row.notes):
        details.append(f"{some:,} changed along few directions and by rounding, which hides the rank")
    rounded = {note for row in changed for note in row.notes if note.startswith(ROUNDING.format(""))}
    if len(rounded) == 1 and all(rounded <= set(row.notes) for row in changed):
        details.append(f"each changed by {rounded.pop()}")
    if not changed:
        return f"Different: the {count} of both are equal, but {', '.join(details)}."
    most = changed[0]
    size = f" (relative change {most.change:.3g})" if most.change is not None else f" ({most.notes[-1]})"
    first = f"{len(changed):,} of {count} differ{'s' * (len(changed) == 1)}, {most.name_a} most{size if size else ''}"
    return f"Different: {'; '.join([first, *details])}."
