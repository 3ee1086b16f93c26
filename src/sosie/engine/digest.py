"""Short digests, to tell whether saved statistics belong to these models and these data."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

AHEAD = 2**30  # bytes of weights on a GPU that are copied for a digest at one time


def digest_of(value: Any) -> str:
    """A short digest of tensors in any structure; of anything else, its text."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(str(key).encode())
            _feed(found, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())


class DigestAhead:
    """The digest of a model's weights, made by another thread while the model runs.

    Should the weights have changed by the time it is asked for, it is made anew.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._marks: dict[str, _Mark] = {}
        self._found: str | None = None
        self._thread: threading.Thread | None = None
        if any(is_lazy(value) for value in weights.values()):
            return  # the first inputs will tell their shapes
        self._marks = {name: _Mark(value) for name, value in weights.items()}
        there = [value for value in weights.values() if isinstance(value, Tensor) and value.device.type != "cpu"]
        if sum(value.numel() * value.element_size() for value in there) <= AHEAD:
            # Copied here: the thread has nothing to do with a GPU, which may be recording what the model does.
            self._thread = threading.Thread(target=self._make, args=(_on_the_cpu(weights),), daemon=True)
            self._thread.start()

    def _make(self, weights: Mapping[str, Any]) -> None:
        try:
            self._found = digest_of(weights)
        except Exception:  # made anew, it says what is amiss
            self._found = None

    def of(self, weights: Mapping[str, Any]) -> str:
        """The digest of these, which are those that it began with unless the model has changed."""
        if self._thread is not None:
            self._thread.join()
        same = self._marks.keys() == weights.keys() and all(self._marks[name].fits(weights[name]) for name in weights)
        return self._found if same and self._found is not None else digest_of(weights)


def _on_the_cpu(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The same values; those of one type on one device come over in one copy, since each copy waits for the device."""
    together: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            together.setdefault((value.device, value.dtype), []).append(name)
    copies = dict(weights)
    for names in together.values():
        tensors = [weights[name].detach() for name in names]
        parts = torch.cat([each.flatten() for each in tensors]).cpu().split([each.numel() for each in tensors])
        copies |= {name: part.view(each.shape) for name, part, each in zip(names, parts, tensors, strict=True)}
    return copies


class _Mark:
    """What tells whether a value is still what it was."""

    def __init__(self, value: Any) -> None:
        self.text = None if isinstance(value, Tensor) else repr(value)
        self.value = value
        self.version = value._version if isinstance(value, Tensor) and not value.is_inference() else None

    def fits(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or not isinstance(self.value, Tensor):
            return self.text == repr(value)
        if self.version is None or self.value._version != self.version:
            return False
        # A buffer that was moved to a device and back is another tensor.
        return _place(self.value) == _place(value) or digest_of(self.value) == digest_of(value)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
