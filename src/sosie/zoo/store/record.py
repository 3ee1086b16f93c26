"""What the store keeps of a model: facts, and rows by kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .names import check_kind, check_name, check_tags, check_text
from .vectors import Rows, Verified, changed, checksum

MOST_ROWS = 4096  # of one kind, of one model
MOST_LETTERS = 1000  # of a site's name


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one kind with the sites that they are of."""

    vectors: Rows
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = self.vectors.shape
        if self.vectors.dtype != np.float32 or len(shape) != 2 or not shape[0] or not shape[1]:
            raise ValueError(f"vectors are float32 (sites, width), got {self.vectors.dtype} {shape}")
        if len(self.labels) != shape[0] or shape[0] > MOST_ROWS:
            raise ValueError(f"{len(self.labels)} sites for vectors of shape {shape}; at most {MOST_ROWS} sites")
        if wrong := [label for label in self.labels if not isinstance(label, str) or len(label) > MOST_LETTERS]:
            raise ValueError(f"a site is called by text of at most {MOST_LETTERS} letters, got {str(wrong[0])[:60]!r}")
        if not np.isfinite(self.vectors).all():
            raise ValueError("vectors with values that are not finite")


@dataclass(frozen=True)
class Facts:
    """What is known of a model beside its vectors; None: not said."""

    tags: tuple[str, ...] = ()
    task: str | None = None
    source: str | None = None
    parent: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", check_tags(self.tags))
        for name in ("task", "source"):
            if getattr(self, name) is not None:
                check_text(getattr(self, name), name)
        if self.parent is not None:
            check_name(self.parent, "parent")


@dataclass(frozen=True, eq=False)
class Record:
    """A model that is to be written."""

    name: str
    digest: str  # of the weights
    architecture: str
    parameters: int
    blocks: dict[str, Block]  # by kind
    facts: Facts = field(default_factory=Facts)
    about: dict[str, Any] = field(default_factory=dict)  # JSON

    def __post_init__(self) -> None:
        check_name(self.name)
        check_text(self.digest, "digest")
        check_text(self.architecture, "architecture")
        if (
            isinstance(self.parameters, bool)
            or not isinstance(self.parameters, int)
            or not 0 <= self.parameters < 2**63
        ):
            raise ValueError(f"{self.name!r}: a number of parameters is a whole number, got {self.parameters!r}")
        try:
            json.dumps([self.about, *(block.labels for block in self.blocks.values())], ensure_ascii=False).encode()
            json.dumps(self.about, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:  # half a character; numbers that JSON has not
            raise ValueError(f"{self.name!r}: what is said of it cannot be kept: {error}") from error
        for kind in self.blocks:
            check_kind(kind)


@dataclass(frozen=True, eq=False)
class Stored(Record):
    """A model that was read."""

    id: int = 0
    added: str = ""


@dataclass(frozen=True, eq=False)
class Mapped:
    """All rows of a kind, those of removed models among them, and which belong to whom.

    They are not verified before they are read: whoever reads rows calls `verify` for their models first.
    """

    kind: str
    rows: Rows  # (all rows, width), on the disk
    models: NDArray[np.int64]  # ids, in the order of their rows
    first: NDArray[np.int64]  # row of each
    count: NDArray[np.int64]  # rows of each
    sums: NDArray[np.object_] | None = None  # checksum of each; None: of rows that lie in no file
    verified: Verified = field(default_factory=Verified)

    def verify(self, places: Any = slice(None)) -> None:
        """Compare the rows of these models with their checksums, unless that was done before in this process."""
        if self.sums is None:
            return
        first, count, sums, models = self.first[places], self.count[places], self.sums[places], self.models[places]
        rows = np.asarray(self.rows)
        for k in self.verified.missing(first):
            if checksum(rows[first[k] : first[k] + count[k]]) != sums[k]:
                raise changed(getattr(self.rows, "filename", self.kind), f"model number {models[k]}")
        self.verified.add(first)

    def owner(self, row: int) -> tuple[int, int]:
        """The model that a row is of, and which of its rows it is."""
        k = int(np.searchsorted(self.first, row, side="right")) - 1
        if k < 0 or not 0 <= row - self.first[k] < self.count[k]:
            raise KeyError(f"row {row} of {self.kind} belongs to no model")
        return int(self.models[k]), int(row - self.first[k])

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where among the models those are that rows belong to."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def part(self, chosen: Any) -> Mapped:
        """Some of the models, by their places, in the order of their rows."""
        sums = None if self.sums is None else self.sums[chosen]
        found = self.models[chosen], self.first[chosen], self.count[chosen]
        return Mapped(self.kind, self.rows, *found, sums, self.verified)

    def index(self) -> NDArray[np.int64]:
        """The rows of the models, in order."""
        if not len(self.first):
            return np.empty(0, np.int64)
        before = np.cumsum(self.count) - self.count
        return np.repeat(self.first - before, self.count) + np.arange(int(self.count.sum()))
