"""Short digests, to tell whether saved statistics belong to these models and these data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest_of(value: Any) -> str:
    """A short digest of tensors in any structure; of anything else, its text."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(str(key).encode())
            _feed(found, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())
