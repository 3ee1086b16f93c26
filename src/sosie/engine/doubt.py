"""How much work it is worth to know how far values can be trusted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Doubt:
    """How much work doubt is worth: draws of shuffled rows, and intervals where they are not nearly free."""

    draws: int = 0
    seed: int = 0
    interval: bool = False


NO_DOUBT = Doubt()
