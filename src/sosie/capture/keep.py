"""Keeping activations whole: a later in-place operation must not change what was seen."""

from __future__ import annotations

import torch
from torch import Tensor

from .sites import Site, SiteError


class Keep:
    """The sink that keeps the activation itself, cloned only where the model overwrites it.

    The first forward clones everything and learns from the tensors' version counters which sites are
    overwritten; afterwards only those are cloned.
    """

    def __init__(self) -> None:
        self._overwritten: set[str] | None = None  # None until the first forward is over
        self.start()

    def start(self) -> None:
        self._live: list[tuple[str, Tensor, int]] = []
        self._versions: dict[str, int] = {}

    def __call__(self, site: Site, activation: Tensor) -> Tensor:
        if activation.is_inference():
            # No version counter, and an inference tensor could not enter a later backward: a clone can.
            with torch.inference_mode(False), torch.no_grad():
                return activation.clone()
        if self._overwritten is None:
            self._live.append((site.label, activation, activation._version))
            return activation.clone()
        if site.label in self._overwritten:
            return activation.clone()
        self._versions[site.label] = activation._version
        return activation

    def learn(self) -> None:
        """Called when a forward is over."""
        if self._overwritten is None:
            self._overwritten = {label for label, live, version in self._live if live._version != version}
        self._live.clear()

    def check(self, label: str, kept: Tensor) -> None:
        """Refuse to hand over a tensor that was changed although it had not been in the first forward."""
        version = self._versions.get(label)
        if version is not None and kept._version != version:
            if self._overwritten is not None:
                self._overwritten.add(label)
            raise SiteError(
                f"the activation of site {label!r} was changed in place after it was captured; "
                "run the forward again (it will be cloned), and change the model's output only after reading"
            )
