"""Fingerprints as safetensors files; what others send is checked before it is believed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...results import DamagedFile, read_tensors, write_tensors
from .making import MOST_SITES
from .probe import FEWEST_PROBES, MOST_PROBES
from .projection import check_size, project
from .record import Fingerprint, Vectors, kind_of

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
