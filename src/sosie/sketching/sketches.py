"""Sketch: features and gradients of every site of one model on one set of data, of a fixed size."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..checks import one_of
from ..files import DamagedFile
from ..results import Side
from ..stats import Buckets, load_statistics, on_device, row_hash, save_statistics, storable
from .kernels import KERNELS, Kernel, kernel_of

PARTS = ("features", "gradients", "hadamard", "maps")  # what may be sketched of a site
SAME_DATA = 1e-4  # how far fingerprints of the same inputs may lie apart, relative to their length


# What is kept of each site: sums over rows, so that parts of the data merge exactly


@dataclass(frozen=True)
class Part:
    """S Ψ for one map ψ of the rows, with the sums that centre it and that correct for what sketching adds."""

    rows: Tensor  # (M, k) S Ψ; in two copies (2, M, k) for the sketch of f ⊗ g
    total: Tensor  # (k,) or (2, k): Σ ψ, in float64
    squares: Tensor  # Σ ‖ψ‖², exact even where ψ itself is only sketched
    diagonal: Tensor  # (M,) S (‖ψ₁‖², ‖ψ₂‖², …)

    def merge(self, other: Part, *, order: Tensor | None) -> Part:
        """The part of all rows of both; `order`: of rows that were kept and not sketched."""
        if order is not None:
            rows = torch.cat([self.rows, other.rows], -2)[..., order, :]
            diagonal = torch.cat([self.diagonal, other.diagonal])[order]
        else:
            rows, diagonal = self.rows + other.rows, self.diagonal + other.diagonal
        return Part(rows, self.total + other.total, self.squares + other.squares, diagonal)


@dataclass(frozen=True)
class Pairs:
    """A few rows themselves, those with the smallest hash, for sums over pairs of rows, which a sketch would bias."""

    features: Tensor  # (rows, k)
    gradients: Tensor
    index: np.ndarray  # their global indices, ascending
    most: int
    seed: int

    def merge(self, *others: Pairs) -> Pairs:
        """The rows with the smallest hashes of all."""
        lots = (self, *others)
        index = np.concatenate([lot.index for lot in lots])
        order = np.argsort(row_hash(index, self.seed), kind="stable")[: self.most]
        order = order[np.argsort(index[order])]
        take = torch.from_numpy(order).to(self.features.device)
        f, g = torch.cat([lot.features for lot in lots])[take], torch.cat([lot.gradients for lot in lots])[take]
        return replace(self, features=f, gradients=g, index=index[order])


@dataclass(frozen=True)
class SiteSketch:
    """The sketch of one site."""

    width: int  # columns of its rows, before they were projected
    features: Part | None
    gradients: Part | None
    hadamard: Part | None  # of f ⊗ g, by TensorSketch
    maps: Part | None  # of the products of f and g, neuron by neuron
    inner: Tensor | None  # Σ ⟨f, g⟩²
    fourth: Tensor | None  # Σ (‖f‖² ‖g‖²)²
    moment: Tensor | None  # (k, k) Σ g fᵀ, where that is small
    pairs: Pairs | None
    trace: Tensor | None = None  # Σ ‖f‖² ‖g‖², the trace of K_f ∘ K_g

    @property
    def folded(self) -> int | None:
        """The number of columns that wider rows were projected to; None: they were not."""
        part = self.features or self.gradients or self.maps
        return None if part is None or part.rows.shape[-1] == self.width else part.rows.shape[-1]

    def part(self, name: str, kernel: str) -> Part:
        """One of the parts, which a kernel needs."""
        part: Part | None = getattr(self, name)
        if part is None:
            raise ValueError(
                f"the kernel {kernel!r} needs a sketch of {name}: make it with kernels={kernel!r} among others"
            )
        return part

    @property
    def dtype(self) -> torch.dtype:
        """The precision that its rows were sketched in."""
        return next(part.rows.dtype for name in PARTS if (part := getattr(self, name)) is not None)

    def merge(self, other: SiteSketch, *, order: Tensor | None) -> SiteSketch:
        """The sketch of all rows of both; `order`: as in `Part.merge`."""
        merged: dict[str, object] = {}
        for name in [f.name for f in fields(self) if f.name != "width"]:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                merged[name] = None
            elif isinstance(mine, Part):
                merged[name] = mine.merge(theirs, order=order)
            else:
                merged[name] = mine.merge(theirs) if isinstance(mine, Pairs) else mine + theirs
        return replace(self, **merged)  # type: ignore[arg-type]

    def check(self, height: int) -> None:
        """Raise unless all shapes fit together for that many buckets: files come from others."""
        for name in PARTS:
            part = getattr(self, name)
            if part is None:
                continue
            columns = part.rows.shape[-1] if name == "hadamard" else self.folded or self.width
            copies = part.rows.shape[:-2]
            shapes = [tuple(t.shape) for t in (part.rows, part.total, part.squares, part.diagonal)]
            expected = [(*copies, height, columns), (*copies, columns), (), (height,)]
            if shapes != expected or len(copies) != (name == "hadamard") or float(part.squares) < 0:
                raise ValueError(f"{name} has shapes {shapes}, not {expected}")
        for total in (self.inner, self.fourth, self.trace):
            if total is not None and (total.ndim or float(total) < 0):
                raise ValueError("its sums of squared products are not numbers of at least 0")
        if self.moment is not None and (self.moment.ndim != 2 or self.moment.shape[0] != self.moment.shape[1]):
            raise ValueError(f"its moment has shape {tuple(self.moment.shape)}")
        if self.pairs is not None:
            f, g, index = self.pairs.features, self.pairs.gradients, self.pairs.index
            if f.ndim != 2 or f.shape != g.shape or index.shape != (len(f),) or len(f) > self.pairs.most:
                raise ValueError(f"its pairs have shapes {tuple(f.shape)}, {tuple(g.shape)} and {index.shape}")

    def shapes(self) -> tuple[object, ...]:
        """Columns of the site and of its parts, which must agree for two to be merged."""
        parts = (self.features, self.gradients, self.hadamard, self.maps)
        return (self.width, *(None if part is None else part.rows.shape[-1] for part in parts))


# What is kept of all sites


class NotShared(ValueError):
    """These sketches do not share rows, buckets or signs, and cannot be compared as if they did."""


@dataclass(frozen=True)
class Spans:
    """The rows that a sketch holds, as ranges that do not touch."""

    ranges: tuple[tuple[int, int], ...]

    def merge(self, other: Spans) -> Spans:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.ranges + other.ranges):
            if merged and start < merged[-1][1]:
                raise ValueError(
                    f"these sketches overlap: rows {start} to {min(stop, merged[-1][1]) - 1} are in both; give each "
                    "part of the data its first_row (sosie.data.DataPart)"
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
        """The permutation that sorts the rows of this one followed by those of the other."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges + other.ranges]).argsort()

    def __str__(self) -> str:
        return ", ".join(f"{start} to {stop - 1}" for start, stop in self.ranges)


@dataclass(frozen=True, eq=False)
class Sketch:
    """One model on one set of data: for every site S F, S G and S T, with T a TensorSketch of f ⊗ g for each row.

    `merge` adds the sketch of other rows of the same data. `sosie.compare(k_a, k_b)` compares two sketches that share
    rows and S, `sosie.compare_unpaired` two that do not; `using` chooses the kernel that is compared.
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
    fingerprint: Tensor  # (M,) S of one number per input, which shows whether two sketches are of the same data
    spans: Spans
    rows_rule: str
    output: str  # what the gradients are of
    labels: Tensor | None = None  # (M, classes) S of the labels, one column per class
    unsigned_labels: Tensor | None = None  # the same with every sign +1
    model: str = ""  # digest of the weights
    about: dict[str, Any] = field(default_factory=dict)  # provenance
    compared: str = field(default="hadamard", metadata={"kept": False})  # the name of the kernel that is compared
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
        """The device of its tensors: that of the model, unless the sketch was moved or loaded."""
        return self.ones.device

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(t.numel() * t.element_size() for t in _tensors(self))

    def site(self, label: str) -> SiteSketch:
        if label not in self.side.sites:
            raise KeyError(f"no site {label!r} in this sketch, only {', '.join(self.side.sites)}")
        return self.sites[self.side.sites.index(label)]

    def using(self, kernel: str) -> Sketch:
        """The same sketch, compared by this kernel.

        "hadamard" (features × gradients, the default), "features", "gradients", "sum", "maps" or "midpoint".
        """
        return replace(self, compared=one_of(kernel, "kernel", KERNELS))

    def kernel(self, label: str, name: str | None = None) -> Kernel:
        """The kernel of one site, made once: `.gram` is S K Sᵀ, centred, `.raw_gram` as it is."""
        name = name or self.compared
        if (label, name) not in self._kernels:
            self._kernels[label, name] = kernel_of(self.site(label), name, self)
        return self._kernels[label, name]

    def kernels(self, name: str | None = None) -> list[Kernel]:
        return [self.kernel(label, name) for label in self.side.sites]

    def at(self, *sites: str) -> Sketch:
        """The sketch of these sites alone."""
        if not sites:
            raise ValueError(f"name at least one site of {', '.join(self.side.sites)}")
        chosen = [self.side.sites.index(label) for label in sites if self.site(label)]
        lists = [getattr(self.side, name) for name in ("sites", "widths", "shapes", "dtypes")]
        side = Side(self.side.name, *(tuple(each[i] for i in chosen if each) for each in lists))
        return replace(self, side=side, sites=tuple(self.sites[i] for i in chosen))

    def to(self, device: str | torch.device) -> Sketch:
        """This sketch on another device, where its kernels are then computed."""
        moved: Sketch = on_device(replace(self, _kernels={}), torch.device(device))
        return self if moved.device == self.device else moved

    def merge(self, other: Sketch) -> Sketch:
        """The sketch of all rows of both, equal to that from one pass over them; on the device of this one."""
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
        # Rows that are kept are put in order.
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
        """Read a sketch that `save` wrote."""
        sketch = load_statistics(path, kind="sketch")[0].get("sketch")
        try:
            if not isinstance(sketch, cls):
                raise TypeError("it does not hold a sketch")
            sketch._check()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return sketch

    def _check(self) -> None:
        """Raise unless everything fits together: files come from others."""
        if self.size is not None:
            Buckets(self.size, self.seed, self.stack)  # checks them
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
            raise TypeError("its row rule or its output is not a text")
        if not isinstance(self.about, dict) or not isinstance(self.about.get("models", []), list):
            raise TypeError("its record of models is not a list")
        if not all(isinstance(label, str) for label in (self.side.name, *self.side.sites)):
            raise TypeError(f"sites and models must have names, got {self.side.sites} of {self.side.name}")
        if len(set(self.side.sites)) < len(self.side.sites):
            raise ValueError(f"two sites have one name among {', '.join(self.side.sites)}")
        for site, label, width in zip(self.sites, self.side.sites, self.side.widths, strict=True):
            if not isinstance(site, SiteSketch) or site.width != width:
                raise ValueError(f"{label}: not a sketch of rows of {width} columns")
            site.check(height)
            if [getattr(site, name) is None for name in PARTS] != [name not in self.parts for name in PARTS]:
                raise ValueError(f"{label}: its parts are not {', '.join(self.parts)}")
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


_UNPAIRED = "compare_unpaired (--unpaired) compares sketches that share no rows, and shows what chance gives"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [tensor for f in fields(value) for tensor in _tensors(getattr(value, f.name))]
    return []


storable(Sketch, SiteSketch, Part, Pairs, Spans, Side)
