"""Sketch: features and gradients of every site of one model on one set of data, of a size that data do not change."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..files import DamagedFile
from ..results import Side
from ..stats import Buckets, load_statistics, on_device, save_statistics, storable
from .kernels import KERNELS, Kernel, kernel_of
from .site import PARTS, Pairs, Part, SiteSketch

SAME_DATA = 1e-4  # how far fingerprints of the same inputs may lie apart, relative to their length


class NotShared(ValueError):
    """Sketches that do not share rows, buckets or signs, compared as if they did."""


@dataclass(frozen=True)
class Spans:
    """Which rows a sketch holds, as ranges that do not touch."""

    ranges: tuple[tuple[int, int], ...]

    def merge(self, other: Spans) -> Spans:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.ranges + other.ranges):
            if merged and start < merged[-1][1]:
                raise ValueError(
                    f"these sketches overlap: rows {start} to {min(stop, merged[-1][1]) - 1} are in both; give each "
                    "part of the data its first_row"
                )
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return Spans(tuple(merged))

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def order(self, other: Spans) -> Tensor:
        """Where each row stands once those of the other follow these, by index."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges + other.ranges]).argsort()

    def __str__(self) -> str:
        return ", ".join(f"{start} to {stop - 1}" for start, stop in self.ranges)


@dataclass(frozen=True, eq=False)
class Sketch:
    """One model on one set of data: for every site S F, S G and S T, with T a TensorSketch of f ⊗ g for each row.

    `merge` adds the sketch of other rows of the same data. `sosie.compare(k_a, k_b)` compares two that share their
    rows and their S; `sosie.compare_unpaired` those that do not.
    """

    kind: ClassVar[str] = "sketch"
    side: Side
    sites: tuple[SiteSketch, ...]
    n: int
    size: int | None  # buckets; None: every row is kept
    seed: int
    stack: int
    ones: Tensor  # (M,) S 1
    counts: Tensor  # (M,) the same with every sign +1
    fingerprint: Tensor  # (M,) S of one number per input: tells whether two sketches are of the same data
    spans: Spans
    rows_rule: str
    output: str  # what the gradients are of
    labels: Tensor | None = None  # (M, classes) S of the labels, one column per class
    unsigned_labels: Tensor | None = None  # the same with every sign +1
    model: str = ""  # digest of the weights
    about: dict[str, Any] = field(default_factory=dict)  # provenance
    _kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict, repr=False, metadata={"kept": False})

    @property
    def exact(self) -> bool:
        return self.size is None

    @property
    def height(self) -> int:
        """Rows of each sketch: buckets, or all rows."""
        return len(self.ones)

    @property
    def parts(self) -> tuple[str, ...]:
        """What was sketched."""
        return tuple(name for name in PARTS if self.sites and getattr(self.sites[0], name) is not None)

    @property
    def device(self) -> torch.device:
        """Where it is: the device that the model ran on, unless it was moved or loaded."""
        return self.ones.device

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(t.numel() * t.element_size() for t in _tensors(self))

    def site(self, label: str) -> SiteSketch:
        if label not in self.side.sites:
            raise KeyError(f"no site {label!r} in this sketch, only {', '.join(self.side.sites)}")
        return self.sites[self.side.sites.index(label)]

    def kernel(self, label: str, name: str = "hadamard") -> Kernel:
        """The kernel of one site, made once: `.gram` is S K Sᵀ, centred, `.raw_gram` as it is."""
        if (label, name) not in self._kernels:
            self._kernels[label, name] = kernel_of(self.site(label), name, self)
        return self._kernels[label, name]

    def kernels(self, name: str = "hadamard") -> list[Kernel]:
        return [self.kernel(label, name) for label in self.side.sites]

    def at(self, *sites: str) -> Sketch:
        """The same sketch of these sites alone."""
        if not sites:
            raise ValueError(f"name at least one site of {', '.join(self.side.sites)}")
        chosen = [self.side.sites.index(label) for label in sites if self.site(label)]
        lists = [getattr(self.side, name) for name in ("sites", "widths", "shapes", "dtypes")]
        side = Side(self.side.name, *(tuple(each[i] for i in chosen if each) for each in lists))
        return replace(self, side=side, sites=tuple(self.sites[i] for i in chosen))

    def to(self, device: str | torch.device) -> Sketch:
        """The same sketch on another device: kernels are made there."""
        moved: Sketch = on_device(replace(self, _kernels={}), torch.device(device))
        return self if moved.device == self.device else moved

    def merge(self, other: Sketch) -> Sketch:
        """The sketch of both lots of rows, the same as from one pass over all of them; on the device of this one."""
        for what in ("size", "seed", "stack", "rows_rule", "output", "model"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise ValueError(
                    f"only sketches of one model, made alike, can be merged: {what} is {mine!r} and {theirs!r}"
                )
        for name, mine, theirs in zip(self.side.sites, self.sites, other.sites, strict=False):
            if mine.shapes() != theirs.shapes():
                raise ValueError(f"the sites were not sketched alike: {name} has {mine.shapes()} and {theirs.shapes()}")
        if self.side.sites != other.side.sites:
            raise ValueError(f"the sites are not the same: {self.side.sites} and {other.side.sites}")
        spans, other = self.spans.merge(other.spans), other.to(self.device)
        # Rows that are kept stay in their order.
        order = self.spans.order(other.spans).to(self.device) if self.exact else None
        sums: dict[str, Any] = {}
        for name in ("ones", "counts", "fingerprint", "labels", "unsigned_labels"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                sums[name] = None
                continue
            if mine.ndim == 2:  # a column per class, of which one part of the data may have fewer
                classes = max(mine.shape[1], theirs.shape[1])
                mine, theirs = (torch.nn.functional.pad(t, (0, classes - t.shape[1])) for t in (mine, theirs))
            sums[name] = mine + theirs if order is None else torch.cat([mine, theirs])[order]
        inputs = [sketch.about.get("inputs") for sketch in (self, other)]
        return replace(
            self,
            sites=tuple(a.merge(b, order=order) for a, b in zip(self.sites, other.sites, strict=True)),
            n=self.n + other.n,
            spans=spans,
            **sums,
            about=self.about if None in inputs else {**self.about, "inputs": sum(inputs)},
            _kernels={},
        )

    def check_shared(self, other: Sketch) -> None:
        """Raise unless both sketch the same rows of the same data into the same buckets with the same signs."""
        for what, words in (("size", "sizes"), ("seed", "seeds"), ("stack", "stacks"), ("n", "numbers of rows")):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise NotShared(f"these sketches have different {words}, {mine} and {theirs}: {_UNPAIRED}")
        if self.spans != other.spans:
            raise NotShared(f"these sketches are of different rows, {self.spans} and {other.spans}: {_UNPAIRED}")
        theirs = other.fingerprint.to(self.fingerprint.device)
        if bool((self.fingerprint - theirs).norm() > SAME_DATA * self.fingerprint.norm()):
            raise NotShared(
                f"these sketches are of different data, or of the same in another order or precision: {_UNPAIRED}"
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, which `Sketch.load`, `sosie.compare` and `sosie compare` read."""
        return save_statistics({"sketch": self}, path, kind="sketch")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sketch:
        sketch = load_statistics(path, kind="sketch")[0].get("sketch")
        try:
            if not isinstance(sketch, cls):
                raise TypeError("it holds no sketch")
            sketch._check()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return sketch

    def _check(self) -> None:
        """What every use relies on: files come from others."""
        if self.size is not None:
            Buckets(self.size, self.seed, self.stack)  # looks at them
        height = self.n if self.size is None else self.size
        if len(self.sites) != len(self.side.sites) or not 0 < self.n < 2**53 or len(self.ones) != height:
            raise ValueError(f"{len(self.sites)} sites, {self.n} rows, {len(self.ones)} buckets do not fit together")
        if self.spans.rows != self.n or Spans(()).merge(self.spans) != self.spans:
            raise ValueError(f"rows {self.spans} are not {self.n} rows")
        classes = () if self.labels is None else self.labels.shape[1:2]
        for name in ("ones", "counts", "fingerprint", "labels", "unsigned_labels"):
            tensor, expected = getattr(self, name), (height, *(classes if "labels" in name else ()))
            absent = self.labels is None and "labels" in name
            if (tensor is None) != absent or not (absent or tensor.shape == expected):
                raise ValueError(f"{name} does not have the shape {expected}")
        if abs(float(self.counts.sum()) - self.n * self.stack**0.5) > 1e-6 * self.n * self.stack:
            raise ValueError(f"the buckets hold {float(self.counts.sum()):g} rows, not {self.n}")
        if not all(isinstance(text, str) for text in (self.rows_rule, self.output)):
            raise TypeError("its row rule or its output is no text")
        if not isinstance(self.about, dict) or not isinstance(self.about.get("models", []), list):
            raise TypeError("what it says about its models is no list")
        if not all(isinstance(label, str) for label in (self.side.name, *self.side.sites)):
            raise TypeError(f"sites and models have names, not {self.side.sites} of {self.side.name}")
        if len(set(self.side.sites)) < len(self.side.sites):
            raise ValueError(f"two sites have one name among {', '.join(self.side.sites)}")
        for site, label, width in zip(self.sites, self.side.sites, self.side.widths, strict=True):
            if not isinstance(site, SiteSketch) or site.width != width:
                raise ValueError(f"{label}: no sketch of rows of {width} columns")
            site.check(height)
            if [getattr(site, name) is None for name in PARTS] != [name not in self.parts for name in PARTS]:
                raise ValueError(f"{label}: not the parts {', '.join(self.parts)}")
        for tensor in _tensors(self):
            if not tensor.is_floating_point():
                raise TypeError(f"numbers are stored as {str(tensor.dtype).removeprefix('torch.')}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError("some numbers are not finite")

    def __repr__(self) -> str:
        how = "every row kept" if self.size is None else f"{self.size} buckets, seed {self.seed}"
        return (
            f"<Sketch {self.side.name}: {len(self.sites)} sites, {self.n} rows, {how}, {', '.join(self.parts)}, "
            f"{self.bytes / 2**20:.1f} MiB>"
        )


_UNPAIRED = "compare_unpaired (--unpaired) compares sketches that share no rows, with what chance gives beside it"


def parts_of(kernels: str | tuple[str, ...] | list[str]) -> frozenset[str]:
    """What must be sketched for these kernels."""
    names = [kernels] if isinstance(kernels, str) else list(kernels)
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"no kernel is called {name!r}; there are {', '.join(KERNELS)}")
    if not names:
        raise ValueError(f"a sketch needs at least one kernel of {', '.join(KERNELS)}")
    return frozenset().union(*({name} if name in PARTS else {"features", "gradients"} for name in names))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [tensor for f in fields(value) for tensor in _tensors(getattr(value, f.name))]
    return []


storable(Sketch, SiteSketch, Part, Pairs, Spans, Side)
