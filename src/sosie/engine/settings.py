"""How a comparison is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..capture import Rule
from ..measures import Measure
from .doubt import Doubt


@dataclass(frozen=True)
class Settings:
    """How a comparison is made; see `compare`."""

    measures: tuple[Measure, ...]
    rows: Rule
    device: str | torch.device | None
    precision: str | None
    memory: int | None
    max_rows: int | None
    exact: bool
    block: int
    seed: int
    first_row: int
    doubt: Doubt

    def as_text(self) -> dict[str, Any]:
        """For the record that a result keeps."""
        found: dict[str, Any] = {
            "block": self.block,
            "exact": self.exact,
            "seed": self.seed,
            "precision": self.precision or "default",
            "device": str(self.device or "each model's own"),
        }
        if self.max_rows is not None:
            found["max_rows"] = self.max_rows
        if self.doubt.draws:
            found["null"] = f"permutation, {self.doubt.draws} draws"
        return found


def draws_of(null: str | None, draws: int, kind: str = "permutation") -> int:
    if null not in (None, kind):
        raise ValueError(f"null={null!r}: chance is told by {kind!r}, or not at all (None)")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    return 0 if null is None else draws
