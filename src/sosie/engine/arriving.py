"""Tensors on their way to the CPU: a copy is queued behind what makes them, and waited for when it is read."""

from __future__ import annotations

import torch
from torch import Tensor


class Arriving:
    """A copy that a GPU makes when it gets there; several are waited for in the time of one."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=tensor.is_cuda)
        self._made: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """In memory that the GPU writes to, of which there is little: to be copied if it is kept."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy
