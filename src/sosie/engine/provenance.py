"""The provenance of a result: versions, time, models, data, settings."""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..capture.batches import DECODER_MASK, MASK, is_parts
from ..data import DataPart
from ..stats import row_hash


def provenance(**about: Any) -> dict[str, Any]:
    """JSON-ready facts; `data` and `test` are described by their own names."""
    facts = {
        "sosie": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    for key, value in about.items():
        value = value.data if isinstance(value, DataPart) else value
        if value is not None:
            facts[key] = _describe(value) if key in ("data", "test") else value
    return facts


def describe_model(model: nn.Module, name: str, weights: str, inputs: str = "", known_as: str = "") -> str:
    """One line about a model; `weights`: their origin, from `models.weights_of`; `known_as`: its own name."""
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = type(model).__name__
    own = known_as if known_as not in (kind, name) and not name.startswith(f"{known_as} (") else ""
    parts = [own, kind, f"{count:,} parameters", weights, inputs]
    return f"{name}: {', '.join(filter(None, parts))}"


def _describe(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, torch.Tensor):
        return f"tensor {tuple(data.shape)}"
    return str(getattr(data, "name", type(data).__name__))


# Copies to the CPU that are queued on a GPU, and waited for when they are read


def sent_to_cpu(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to the CPU without waiting for the GPU; the function that is returned waits, and gives the copy.

    It is in pinned memory, which is scarce: copy it to keep it.
    """
    copy = tensor.to("cpu", non_blocking=tensor.is_cuda)
    if not tensor.is_cuda:
        return lambda: copy
    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(tensor.device))

    def arrived() -> Tensor:
        made.synchronize()
        return copy

    return arrived


# Short digests, to detect whether saved statistics belong to these models and these data
#
# Tensors are digested where they are, so a GPU sends a few sums and not its weights. The bytes are read as 32-bit words
# wᵢ in pieces, and two sums Σ wᵢ rᵢ mod 2⁶⁴ with fixed odd 64-bit numbers rᵢ are taken of each piece (multilinear
# hashing, Carter & Wegman 1979), in integers, so that every device gets the same. The digest is the SHA-256 of the sums
# and of names, types, shapes and all other values.
#
# One changed word always changes the sums; for any other two contents of equal layout, the probability over the rᵢ that
# their sums are equal is at most 2⁻⁶⁴, as good as 16 hexadecimal digits can be. That protects against mistakes, not
# against malice: the rᵢ are known, so anyone can make two contents with the same digest. No use of digests needs more:
# they detect another model, probe set or first batch. The bytes of files that must be whole are hashed.

PIECE = 2**18  # words per pair of sums
AT_ONCE = {
    "cpu": 1,
    "cuda": 64,
}  # pieces: a cache holds them, or they keep a GPU busy; other devices leave it to the CPU
WORD = 4  # bytes
STRETCH = 1024  # inputs whose digests are added: an error names the range of inputs that differ
SEEDS = (1, 2)  # of the numbers rᵢ of the two sums
_PARTS_OF_WORDS = {1: torch.uint8, 2: torch.int16, WORD: torch.int32}


def digest_of(value: Any) -> str:
    """A short digest of tensors in any structure; anything else is digested as text."""
    return begin_digest(value)()


def digest_of_model(model: nn.Module) -> str:
    """A short digest of a model's modules and their settings as it prints them, without its weights."""
    return digest_of(re.sub(r" at 0x[0-9a-f]+", "", repr(model)))  # where a function lies differs from run to run


InputDigests = dict[int, int]  # for each `STRETCH` of inputs, the sum of their digests mod 2¹²⁸, in any order


def add_digests(sums: InputDigests, others: Iterable[tuple[int, int]]) -> None:
    """Add digests of other inputs, by stretch."""
    for stretch, value in others:
        sums[stretch] = (sums.get(stretch, 0) + value) % 2**128


def input_digests(batch: Any, start: int, count: int) -> Iterator[tuple[int, int]]:
    """The stretch and the digest of each input of a loader's batch, the first of which has index `start`."""
    digests = [hashlib.blake2b(f"{start + k} ".encode(), digest_size=16) for k in range(count)]
    for name, leaf in _leaves(batch, ""):
        if isinstance(leaf, Tensor):
            kind = f"{name} {leaf.dtype} {tuple(leaf.shape[1:])} ".encode()
            width = leaf[:1].numel() * leaf.element_size()
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for k, digest in enumerate(digests):
                digest.update(kind)
                digest.update(content[k * width : (k + 1) * width])
        else:
            for k, digest in enumerate(digests):
                text = repr(leaf[k] if isinstance(leaf, list) else leaf)
                digest.update(f"{name} {len(text)} {text} ".encode())
    for k, digest in enumerate(digests, start):
        yield k // STRETCH, int.from_bytes(digest.digest(), "little")


def _leaves(batch: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a batch with their paths; tokens without padding, which depends on the rest of the batch."""
    if isinstance(batch, Mapping):
        for mask in (MASK, DECODER_MASK):
            if isinstance(batch.get(mask), Tensor) and batch[mask].ndim == 2:
                batch = _unpadded(batch, mask)
        for key, part in batch.items():
            yield from _leaves(part, f"{name}/{key}")
    elif is_parts(batch):
        for k, part in enumerate(batch):
            yield from _leaves(part, f"{name}/{k}")
    else:
        yield name, batch


def _unpadded(batch: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """Turn tensors as long as the mask into lists, one item per input, of the entries that the mask keeps."""
    kept = batch[mask] != 0
    return {
        key: [row[keep].tolist() for row, keep in zip(part, kept, strict=True)]
        if isinstance(part, Tensor) and part.shape[:2] == kept.shape
        else part
        for key, part in batch.items()
    }


def begin_digest(value: Any) -> Callable[[], str]:
    """Begin `digest_of`: work on a GPU is queued, and the function that is returned waits for it."""
    text: list[str] = []
    streams: dict[int, list[Tensor]] = {width: [] for width in _PARTS_OF_WORDS}
    for kind, part in _parts(value):
        if isinstance(part, Tensor):
            flat = _flat(part)
            streams[flat.element_size()].append(flat)
            part = f"{part.dtype}{tuple(part.shape)}"
        text.append(f"{kind} {len(part)}:{part}")
    runs = [list(_runs([flat for flat in stream if flat.numel()])) for stream in streams.values()]
    every = [[(first, sums.shape[1], sums.device) for first, sums in some] for some in runs]
    sent = _sent([sums for some in runs for _, sums in some])

    def finish() -> str:
        here = {device: arrived() for device, arrived in sent.items()}
        digest = hashlib.sha256("".join(text).encode())
        for places in every:
            pieces = max((first + count for first, count, _ in places), default=0)
            total = torch.zeros(2, pieces, dtype=torch.int64, device="cpu")  # whatever the default device is
            for first, count, device in places:
                total[:, first : first + count] += here[device][:, :count]  # two devices may share a piece
                here[device] = here[device][:, count:]
            digest.update(total.numpy().tobytes())
        return digest.hexdigest()[:16]

    return finish


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and value.is_quantized:
        yield from _parts([str(value.dtype), value.int_repr(), value.dequantize()])  # the latter depends on the scale
    elif isinstance(value, Tensor):
        yield "tensor", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield "name", str(key)
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield "value", repr(value)


def _flat(tensor: Tensor) -> Tensor:
    """The bytes as integers of at most a word; no copy of a contiguous tensor on a device that can sum."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"cannot digest a tensor of layout {layout}: make it dense")
    there = tensor.detach() if tensor.device.type in AT_ONCE else tensor.detach().cpu()
    flat = there.resolve_conj().resolve_neg().reshape(-1).contiguous()  # a column is flat, but not contiguous
    return flat.view(_PARTS_OF_WORDS[min(flat.element_size(), WORD)])


def _runs(stream: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Sums (2, pieces) of consecutive tensors on one device, with the index of the first piece.

    A stream is all tensors one after the other; tensors on other devices count as zeros.
    """
    at = 0
    for device, same in groupby(stream, lambda flat: flat.device):
        run = list(same)
        size = PIECE * WORD // run[0].element_size()
        first, before = divmod(at, size)
        at += sum(flat.numel() for flat in run)
        whole = [run[0].new_zeros(before), *run]
        yield first, torch.cat([_sums(parts) for parts in _cut(whole, size * AT_ONCE[device.type])], dim=1)


def _cut(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Parts of a stream of `size` numbers each, but for the last."""
    parts: list[Tensor] = []
    room = size
    for rest in tensors:
        while rest.numel() > room:
            yield [*parts, rest[:room]] if room else parts
            parts, rest, room = [], rest[room:], size
        if rest.numel():
            parts.append(rest)
            room -= rest.numel()
    yield parts


def _sums(parts: list[Tensor]) -> Tensor:
    """The sums (2, pieces) of a part of a stream; the end is padded with zeros."""
    a_word = WORD // parts[0].element_size()
    count = sum(part.numel() for part in parts)
    if lacking := -count % (a_word if count <= a_word * PIECE else a_word * PIECE):
        parts = [*parts, parts[0].new_zeros(lacking)]
    words = parts[0] if len(parts) == 1 and a_word == 1 else torch.cat(parts).view(torch.int32)
    pieces = words.view(-1, min(len(words), PIECE))
    return torch.stack([(pieces * factors[: pieces.shape[1]]).sum(1) for factors in _factors(words.device)])


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """The numbers rᵢ, (2, PIECE). The copy is waited for, so that any stream of a GPU may read it."""
    drawn = np.stack([row_hash(np.arange(PIECE), seed) for seed in SEEDS]).view(np.int64) | 1
    with torch.inference_mode(False):
        return torch.from_numpy(drawn).to(device)


def _sent(sums: Sequence[Tensor]) -> dict[torch.device, Callable[[], Tensor]]:
    """Copies of sums (2, k) to the CPU, one for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in sums:
        by_device.setdefault(part.device, []).append(part)
    return {device: sent_to_cpu(torch.cat(parts, dim=1)) for device, parts in by_device.items()}
