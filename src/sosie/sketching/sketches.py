"""Sketch: the features and gradients of every site of a model on one data set, in a fixed size; and how it is made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..capture import Chunk, Rule, check_rule, labels_of, rule_name
from ..checks import listed, one_of
from ..engine.plan import MEMORY, parse_size, size_text
from ..engine.provenance import provenance
from ..engine.stream import Stream, rows_per_input
from ..files import reading
from ..notebook import html_facts
from ..process_state import products
from ..results import Side
from ..stats.sample import Fold
from ..stats.sampling import Buckets, Placement, RowSampler, check_seed, row_hash
from ..stats.storage import load_statistics, on_device, save_statistics, storable, tensors_of
from .gradients import BETA, GradientNetwork, Loss, input_numbers, predictive_of
from .kernels import KERNELS, Kernel, kernel_of

PARTS = ("features", "gradients", "hadamard", "maps")  # the parts of a site that can be sketched
# Largest distance of two fingerprints of the same inputs, relative to their length: float32 rounds up to 6e-6 of it
# away (150,528 numbers per input), and inputs in another order differ by little where they lie far from zero.
SAME_DATA = 2e-5
SIZE = 512
LARGE = 2**30  # bytes of a sketch that are worth a warning before the pass
DEFAULT_KERNELS = ("features", "gradients", "hadamard")
MOST_CLASSES = 2**15  # larger whole numbers are not read as labels: a column for each would take too much memory
MOMENT = 1024  # largest number of neurons for which Σ g fᵀ is kept whole
PAIR_NUMBERS = 2**23  # numbers of each of f and g that are kept for pairs of rows
MOST_PAIRED, FEWEST_PAIRED = 512, 64  # rows that are kept for them
_SUMMED = 256  # rows that are summed in their own precision
LABELS = 2**16  # labels that are summed at a time


# The sketch of one site: sums over rows, so that parts of the data merge exactly


@dataclass(frozen=True)
class Part:
    """S Ψ for one map ψ of the rows, with the sums that centre it and that correct the bias of sketching."""

    rows: Tensor  # (M, k) S Ψ; two copies (2, M, k) for the sketch of f ⊗ g
    total: Tensor  # (k,) or (2, k): Σ ψ, in float64
    squares: Tensor  # Σ ‖ψ‖², exact even where ψ itself is only sketched
    diagonal: Tensor  # (M,) S (‖ψ₁‖², ‖ψ₂‖², …)

    @classmethod
    def of_all(cls, parts: Sequence[Part]) -> Part:
        """Join parts that keep every row, in the order of these parts."""
        rows, diagonal = torch.cat([part.rows for part in parts], -2), torch.cat([part.diagonal for part in parts])
        total, squares = torch.stack([part.total for part in parts]), torch.stack([part.squares for part in parts])
        return cls(rows, total.sum(0), squares.sum(0), diagonal)

    def merge(self, other: Part, *, order: Tensor | None) -> Part:
        """The part of all rows of both; `order` sorts the rows of parts that keep every row."""
        if order is not None:
            both = Part.of_all([self, other])
            return replace(both, rows=both.rows[..., order, :], diagonal=both.diagonal[order])
        return Part(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Pairs:
    """The rows with the smallest hashes, for sums over pairs of rows, which a sketch would bias."""

    features: Tensor  # (rows, k)
    gradients: Tensor
    index: np.ndarray  # their global indices, ascending
    most: int
    seed: int

    def merge(self, *others: Pairs) -> Pairs:
        samples = (self, *others)
        index = np.concatenate([sample.index for sample in samples])
        order = np.argsort(row_hash(index, self.seed), kind="stable")[: self.most]
        order = order[np.argsort(index[order])]
        take = torch.from_numpy(order).to(self.features.device)
        f, g = (torch.cat([getattr(sample, name) for sample in samples])[take] for name in ("features", "gradients"))
        return replace(self, features=f, gradients=g, index=index[order])


@dataclass(frozen=True)
class SiteSketch:
    """The sketch of one site."""

    width: int  # columns of its rows, before they were projected
    features: Part | None
    gradients: Part | None
    hadamard: Part | None  # of f ⊗ g, by TensorSketch
    maps: Part | None  # of the products of f and g, neuron by neuron
    fourth: Tensor | None  # Σ (‖f‖² ‖g‖²)²
    moment: Tensor | None  # (k, k) Σ g fᵀ, where that is small
    pairs: Pairs | None
    trace: Tensor | None = None  # Σ ‖f‖² ‖g‖², the trace of K_f ∘ K_g
    inner: Tensor | None = None  # Σ ⟨f, g⟩² in files of earlier versions; nothing reads it

    @property
    def folded(self) -> int | None:
        """The number of columns that rows were projected to; None if they were not projected."""
        part = self.features or self.gradients or self.maps
        return None if part is None or part.rows.shape[-1] == self.width else part.rows.shape[-1]

    def part(self, name: str, kernel: str) -> Part:
        """The part of this name, or an error that names the kernel that needs it."""
        part: Part | None = getattr(self, name)
        if part is None:
            raise ValueError(f"the kernel {kernel!r} needs a sketch of {name}: add {kernel!r} to kernels=")
        return part

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that were sketched."""
        return tuple(name for name in PARTS if getattr(self, name) is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which rows were sketched."""
        dtype: torch.dtype = getattr(self, self.parts[0]).rows.dtype
        return dtype

    def stored(self, dtype: torch.dtype) -> SiteSketch:
        """The sketch with rows in this precision; those in float64 stay as they are."""
        if self.dtype not in (torch.bfloat16, torch.float32):
            return self
        parts = {name: replace(part, rows=part.rows.to(dtype)) for name in PARTS if (part := getattr(self, name))}
        if self.pairs is not None:
            f, g = self.pairs.features.to(dtype), self.pairs.gradients.to(dtype)
            parts["pairs"] = replace(self.pairs, features=f, gradients=g)
        return replace(self, **parts)

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self))

    def merge(self, other: SiteSketch, *, order: Tensor | None) -> SiteSketch:
        """The sketch of all rows of both; `order` as in `Part.merge`."""

        def merged(a: Any, b: Any) -> Any:
            if a is None or b is None:
                return None
            if isinstance(a, Part):
                return a.merge(b, order=order)
            return a.merge(b) if isinstance(a, Pairs) else a + b

        names = [f.name for f in fields(self) if f.name != "width"]
        return replace(self, **{name: merged(getattr(self, name), getattr(other, name)) for name in names})

    def check(self, height: int) -> None:
        """Raise unless all shapes fit a sketch of that many buckets: the file may come from anyone."""
        for name in self.parts:
            part = getattr(self, name)
            copies, columns = ((2,), part.rows.shape[-1]) if name == "hadamard" else ((), self.folded or self.width)
            shapes = [tuple(getattr(part, f.name).shape) for f in fields(part)]
            expected = [(*copies, height, columns), (*copies, columns), (), (height,)]
            if shapes != expected or float(part.squares) < 0:
                raise ValueError(f"{name} has shapes {shapes}, not {expected}")
        for total in (self.inner, self.fourth, self.trace):
            if total is not None and (total.ndim or float(total) < 0):
                raise ValueError("its sums of squared products are not numbers of at least 0")
        if self.moment is not None and self.moment.shape != 2 * self.moment.shape[:1]:
            raise ValueError(f"its moment has shape {tuple(self.moment.shape)}")
        if self.pairs is not None:
            f, g, index = self.pairs.features, self.pairs.gradients, self.pairs.index
            if f.ndim != 2 or f.shape != g.shape or index.shape != (len(f),) or len(f) > self.pairs.most:
                raise ValueError(f"its pairs have shapes {tuple(f.shape)}, {tuple(g.shape)} and {index.shape}")


# The sketch of all sites


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
        """The permutation that sorts these rows followed by those of the other."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges + other.ranges]).argsort()

    def __str__(self) -> str:
        return ", ".join(f"{start} to {stop - 1}" for start, stop in self.ranges)


@dataclass(frozen=True, eq=False)
class Sketch:
    """One model on one data set: S F, S G and S T for every site, with T a TensorSketch of f ⊗ g for each row.

    `merge` adds the sketch of other rows of the same data. `sosie.compare(k_a, k_b)` compares two sketches that share
    rows and S, `sosie.compare_unpaired` two that do not; `using` chooses the kernel to compare.
    """

    kind: ClassVar[str] = "sketch"
    side: Side
    sites: tuple[SiteSketch, ...]
    n: int
    size: int | None  # buckets; None if every row is kept
    seed: int
    stack: int
    ones: Tensor  # (M,) S 1
    counts: Tensor  # (M,) S 1 with every sign +1
    fingerprint: Tensor  # (M,) S of one number per input, which shows whether two sketches are of the same data
    spans: Spans
    rows_rule: str
    output: str  # the loss that the gradients belong to
    labels: Tensor | None = None  # (M, classes) S of the labels, one column per class
    unsigned_labels: Tensor | None = None  # S of the labels with every sign +1
    model: str = ""  # digest of the weights
    about: dict[str, Any] = field(default_factory=dict)  # provenance
    compared: str = field(default="hadamard", metadata={"kept": False})  # the name of the kernel that is compared
    _kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict, repr=False, metadata={"kept": False})

    @property
    def exact(self) -> bool:
        return self.size is None

    @property
    def height(self) -> int:
        """The number of buckets, or of rows if every row is kept."""
        return len(self.ones)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that were sketched."""
        return self.sites[0].parts if self.sites else ()

    @property
    def device(self) -> torch.device:
        """The device of its tensors: the model's, unless the sketch was moved or loaded."""
        return self.ones.device

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(t.numel() * t.element_size() for t in tensors_of(replace(self, _kernels={})))

    def site(self, label: str) -> SiteSketch:
        if label not in self.side.sites:
            raise KeyError(f"no site {label!r} in this sketch, only {', '.join(self.side.sites)}")
        return self.sites[self.side.sites.index(label)]

    def using(self, kernel: str) -> Sketch:
        """This sketch, to be compared by another kernel.

        "hadamard" (features × gradients, the default), "features", "gradients", "sum", "maps" or "midpoint".
        """
        return replace(self, compared=one_of(kernel, "kernel", KERNELS))

    def kernel(self, label: str, name: str | None = None) -> Kernel:
        """The kernel of one site, made once: `.gram` is S K Sᵀ of the centred kernel, `.raw_gram` of the uncentred."""
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
        side = Side(self.side.name, *(tuple(values[i] for i in chosen if values) for values in lists))
        return replace(self, side=side, sites=tuple(self.sites[i] for i in chosen))

    def to(self, device: str | torch.device) -> Sketch:
        """This sketch on another device, on which its kernels are then computed."""
        moved: Sketch = on_device(replace(self, _kernels={}), torch.device(device))
        return self if moved.device == self.device else moved

    def _settings(self) -> dict[str, Any]:
        """All that must agree for two sketches to be merged, with the columns of each site and of its parts."""
        names = ("size", "seed", "stack", "rows_rule", "output", "model")
        columns = {
            f"site {label}": {"width": site.width, **{name: getattr(site, name).rows.shape[-1] for name in site.parts}}
            for label, site in zip(self.side.sites, self.sites, strict=True)
        }
        return {**{name: getattr(self, name) for name in names}, "sites": self.side.sites, **columns}

    def merge(self, other: Sketch) -> Sketch:
        """The sketch of all rows of both, equal to that from one pass over them; on the device of this one."""
        ours, theirs = self._settings(), other._settings()
        if odd := next((name for name in ours if ours[name] != theirs.get(name)), None):
            raise ValueError(f"only sketches of one model, made alike, merge: {odd}: {ours[odd]!r} and {theirs[odd]!r}")
        spans, other = self.spans.merge(other.spans), other.to(self.device)
        order = self.spans.order(other.spans).to(self.device) if self.exact else None
        sums: dict[str, Any] = {}
        for name in ("ones", "counts", "fingerprint", "labels", "unsigned_labels"):
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                sums[name] = None
                continue
            if a.ndim == 2:  # a column per class; one part of the data may have fewer classes
                classes = max(a.shape[1], b.shape[1])
                a, b = (pad(t, (0, classes - t.shape[1])) for t in (a, b))
            sums[name] = a + b if order is None else torch.cat([a, b])[order]
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

    def difference_from(self, other: Sketch) -> str | None:
        """Where they differ, in words; None if both are of the same rows, in the same buckets with the same signs."""
        for what, words in (("size", "sizes"), ("seed", "seeds"), ("stack", "stacks"), ("n", "numbers of rows")):
            a, b = getattr(self, what), getattr(other, what)
            if a != b:
                return f"these sketches have different {words}, {a} and {b}"
        if self.spans != other.spans:
            return f"these sketches are of different rows, {self.spans} and {other.spans}"
        difference = self.fingerprint - other.fingerprint.to(self.fingerprint.device)
        differs = bool(difference.norm() > SAME_DATA * self.fingerprint.norm())
        return "these sketches are of different data, another order or precision" if differs else None

    def check_shared(self, other: Sketch) -> None:
        """Raise unless both sketch the same rows of the same data into the same buckets with the same signs."""
        if (difference := self.difference_from(other)) is not None:
            raise ValueError(
                f"{difference}: compare_unpaired (--unpaired) compares sketches that share no rows, and shows what "
                "chance gives"
            )

    def save(self, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Path:
        """Write a safetensors file, which `Sketch.load`, `sosie.compare` and `sosie compare` read.

        `dtype=torch.bfloat16` writes sketched rows in half the size; on two small networks it changed linear_cka of
        features and gradients by less than 1e-4 (docs/sketches.md). A sketch that keeps every row, or in float64, is
        always written as it is.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a sketch is written in torch.bfloat16 or torch.float32, not {dtype}")
        sketch = self if self.exact else replace(self, sites=tuple(site.stored(dtype) for site in self.sites))
        return save_statistics({"sketch": sketch}, path, kind="sketch")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sketch:
        """Read a sketch that `save` wrote."""
        sketch = load_statistics(path, kind="sketch")[0].get("sketch")
        with reading(path):
            if not isinstance(sketch, cls):
                raise TypeError("it does not hold a sketch")
            sketch._check()
        return replace(sketch, sites=tuple(site.stored(torch.float32) for site in sketch.sites))

    def _check(self) -> None:
        """Raise unless everything fits together: the file may come from anyone."""
        if self.size is not None:
            Buckets(self.size, self.seed, self.stack)  # checks them
        height = self.n if self.size is None else self.size
        if len(self.sites) != len(self.side.sites) or not 0 < self.n < 2**53 or len(self.ones) != height:
            raise ValueError(f"{len(self.sites)} sites, {self.n} rows, {len(self.ones)} buckets do not fit together")
        if self.spans.rows != self.n or Spans(()).merge(self.spans) != self.spans:
            raise ValueError(f"rows {self.spans} are not {self.n} rows")
        classes = () if self.labels is None else self.labels.shape[1:2]
        for name in ("ones", "counts", "fingerprint", *(("labels", "unsigned_labels") if classes else ())):
            expected = (height, *(classes if "labels" in name else ()))
            if getattr(self, name).shape != expected:
                raise ValueError(f"{name} does not have the shape {expected}")
        if abs(float(self.counts.sum()) - self.n * self.stack**0.5) > 1e-6 * self.n * self.stack:
            raise ValueError(f"the buckets hold {float(self.counts.sum()):g} rows, not {self.n}")
        if not isinstance(self.about, dict) or not isinstance(self.about.get("models", []), list):
            raise TypeError("its record of models is not a list")
        texts = (self.side.name, *self.side.sites, self.rows_rule, self.output)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"models, sites, row rules and outputs must have names, got {texts}")
        if len(set(self.side.sites)) < len(self.side.sites):
            raise ValueError(f"two sites have one name among {', '.join(self.side.sites)}")
        for site, label, width in zip(self.sites, self.side.sites, self.side.widths, strict=True):
            if not isinstance(site, SiteSketch) or site.width != width:
                raise ValueError(f"{label}: not a sketch of rows of {width} columns")
            site.check(height)
            if site.parts != self.parts:
                raise ValueError(f"{label}: its parts are not {', '.join(self.parts)}")
        for tensor in tensors_of(self):
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

    def _repr_html_(self) -> str:
        kept = "every row" if self.size is None else f"{self.size} buckets, seed {self.seed}"
        widths = zip(self.side.sites, self.side.widths, self.sites, strict=True)
        sites = [
            f"{label} ({width:,} wide{'' if site.folded is None else f', projected to {site.folded:,}'})"
            for label, width, site in widths
        ]
        facts = {
            "model": self.side.name,
            "sites": listed(sites, most=20),
            "rows": f"{self.n:,}, made by {self.rows_rule}",
            "kept": kept,
            "of each site": ", ".join(self.parts),
            "gradients of": self.output,
            "size": size_text(self.bytes),
            "compared by": self.compared,
        }
        return html_facts("Sketch", facts)


storable(Sketch, SiteSketch, Part, Pairs, Spans, Side)


# Making a sketch: one pass of a model over data


def sketch(
    model: Any,
    data: Any,
    *,
    sites: Any = None,
    size: int | None = SIZE,
    seed: int = 0,
    kernels: str | Sequence[str] = DEFAULT_KERNELS,
    rows: Rule = "flatten",
    output: str | Loss = "logits",
    beta: float = BETA,
    stack: int = 1,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
) -> Sketch:
    """Sketch the features and gradients of a model at every site, in one forward and one backward pass.

    The gradient at a site is that of the loss expected under the model's own prediction tempered by `beta`, q ∝ p^β,
    so that no labels are needed. `output` is "logits", "gaussian" (the model returns a mean and a log-variance), or a
    function(answer, batch) → one loss per input. Gradients become rows by the same rule as features.

    `size` is the number of buckets in which rows are summed, with signs (CountSketch); each row is in `stack` of them.
    None keeps every row, which is exact and grows with the data. `seed` and the row's index decide its bucket and sign:
    two models on the same data share them and can be compared with `sosie.compare`. `kernels` names what the sketch
    supplies; see `Sketch.using`. Labels in the batches are sketched too, for `classify`. Sites too wide for the budget
    `memory` are projected, with a caveat. Sketches of parts of the data (`sosie.data.DataPart`) can be merged.
    `data`, `sites`, `prepare`, `inputs`, `device` and `max_rows` are those of `sosie.compare`. The sketch stays on the
    model's device; `sketch.to("cpu")` moves it.
    """
    check_rule(rows)
    if data is None:
        raise TypeError("a model is sketched on data: sketch(model, data)")
    parts = parts_of(kernels)
    if size is None and "hadamard" in parts:
        parts = (parts - {"hadamard"}) | {"features", "gradients"}  # the product is computed from the rows themselves
    if size is None and stack != 1:
        raise ValueError(f"size=None keeps every row, so there is nothing to stack: got stack={stack}")
    buckets = None if size is None else Buckets(size, seed, stack)
    check_seed(seed)
    predictive = predictive_of(output, beta)
    network = GradientNetwork.of(
        model, sites=sites, rows=rows, prepare=prepare, inputs=inputs, device=device, predictive=predictive
    )
    with network.opened():
        stream = Stream.of(data, [network], max_rows)
        side = network.look(stream.first)
        mixing = network.mixing(stream.first)
        per_input = rows_per_input([network])
        known = None if stream.expected is None else stream.expected * per_input
        budget = MEMORY if memory is None else parse_size(memory) or MEMORY
        makers = plan_sites(side.widths, size, parts, seed=seed, memory=budget, rows=known)
        maker = SketchMaker(network, dict(zip(side.sites, makers, strict=True)), buckets, stream.first_row * per_input)
        need = sum(maker.bytes(known) for maker in makers)
        if need > LARGE:
            widest, width = max(zip(side.sites, side.widths, strict=True), key=lambda pair: pair[1])
            warnings.warn(
                f"the sketch of {network.name} will take {size_text(need)}, most of it for wide sites ({widest}: "
                f"{width:,} columns): rows='mean', a smaller size, fewer sites or memory= make it smaller",
                stacklevel=2,
            )
        for chunk in network.chunks(stream, task=f"sketching, {size_text(need)},"):
            maker.take(chunk)
        mixing = mixing or network.note_after_pass()
        sums = maker.finish()
        digest = network.digest()
    rule = rule_name(rows)
    settings = {"size": size, "seed": seed, "stack": stack, "rows": rule, "device": str(device or "the model's own")}
    about = provenance(settings=settings, models=[network.describe()], data=data, mixing=mixing)
    return Sketch(
        side=side,
        size=size,
        seed=seed,
        stack=stack,
        rows_rule=rule,
        output=predictive.words if maker.backwards else "none",
        model=digest,
        about={**about, "inputs": maker.inputs},
        **sums,
    )


def parts_of(kernels: str | Sequence[str]) -> frozenset[str]:
    """The parts of a site that must be sketched for these kernels."""
    names = [kernels] if isinstance(kernels, str) else list(kernels or ())
    if not names:
        raise ValueError(f"a sketch needs at least one kernel of {', '.join(KERNELS)}")
    names = [one_of(name, "kernel", KERNELS) for name in names]
    return frozenset().union(*({name} if name in PARTS else {"features", "gradients"} for name in names))


class SketchMaker:
    """Sketches chunk after chunk, with a backward pass where gradients are needed; sums stay on the model's device."""

    def __init__(
        self, network: GradientNetwork, makers: dict[str, SiteMaker], buckets: Buckets | None, first: int
    ) -> None:
        """`first` is the global index of the first row."""
        self.network, self.makers, self.buckets = network, makers, buckets
        self.backwards = any(maker.with_gradients for maker in makers.values())
        self.first = self.start = first  # index of the first row, and of the first row of the next chunk
        self.inputs = 0
        self._device = torch.device("cpu")
        self._drawn: Placement | None = None
        self._rows = 0
        self._sums: Tensor | None = None  # (3, M): of ones, of ones without signs, of the fingerprint
        self._numbers: list[Tensor] = []  # the fingerprint, where every row is kept
        # Labels are summed at the end, since reading how many classes there are synchronises a GPU.
        self._labels: list[Tensor] | None = []  # None once a row has no label

    def take(self, chunk: Chunk) -> None:
        self._drawn, self._rows = None, 0
        self.network.read_rows(chunk, self._features, self._gradients if self.backwards else None)
        with products():
            self._shared(chunk)
        self.start += self._rows
        self.inputs += chunk.count

    def _features(self, site: str, rows: Tensor) -> None:
        if not self._rows:
            self._rows, self._device = len(rows), rows.device
            if self.buckets is not None:
                self._drawn = self.buckets.draw(self.start, len(rows), rows.device)
        elif len(rows) != self._rows:
            raise ValueError(f"need the same number of rows at every site, got {self._rows}, and {len(rows)} at {site}")
        lengths = self.makers[site].features(rows, self._drawn)  # NaN or infinite where a row is
        self.network.note_finite(f"the activations at {site} are", lengths)

    def _gradients(self, site: str, rows: Tensor) -> None:
        with torch.no_grad():
            lengths = self.makers[site].gradients(rows, self._drawn, self.start)
            self.network.note_finite(f"the gradients at {site} are", lengths)

    def _shared(self, chunk: Chunk) -> None:
        """Sketch what all sites share: ones, the fingerprint, and the labels."""
        numbers = input_numbers(chunk.batch, chunk.count, self._device)
        for counts in list(self.network.counts().values())[:1]:  # positions: an input's number is at its first row
            counts = _moved(counts, self._device)
            first = torch.where(counts > 0, counts.cumsum(0) - counts, self._rows)  # past the end if it has no rows
            numbers = numbers.new_zeros(self._rows + 1).index_put_((first,), numbers)[: self._rows]
        labels = labels_of(chunk.batch)
        if self._labels is None or labels is None or self._rows != chunk.count:
            self._labels = None
        else:
            self._labels.append(_moved(labels, self._device).long())
        if self._drawn is None:
            self._numbers.append(numbers)
            return
        assert self.buckets is not None
        if self._sums is None:
            self._sums = numbers.new_zeros(3, self.buckets.size)
        ones = torch.ones_like(numbers)
        self._drawn.add(self._sums[0], ones)
        self._drawn.add(self._sums[1], ones, signed=False)
        self._drawn.add(self._sums[2], numbers)

    def _label_sums(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """(M, classes) with the signs of the sketch, and without; None where labels are missing or are not classes."""
        if not self._labels:
            return None, None
        labels = torch.cat(self._labels)
        least, most = torch.stack([labels.min(), labels.max()]).tolist()
        if not 0 <= least <= most < MOST_CLASSES:
            return None, None
        if self.buckets is None:
            coded = one_hot(labels).double()
            return coded, coded
        signed, unsigned = labels.new_zeros(2, self.buckets.size, most + 1, dtype=torch.float64)
        for k, some in enumerate(labels.split(LABELS)):
            drawn = self.buckets.draw(self.first + k * LABELS, len(some), labels.device)
            entries = (drawn.buckets * (most + 1) + some).flatten()
            signed.view(-1).index_add_(0, entries, drawn.signs.flatten())
            unsigned.view(-1).index_add_(0, entries, drawn.signs.abs().flatten())
        return signed, unsigned

    @products()
    def finish(self) -> dict[str, Any]:
        """The fields of a sketch that come from the pass, all on one device."""
        if self._sums is None:
            numbers = torch.cat(self._numbers)
            self._sums = torch.stack([torch.ones_like(numbers), torch.ones_like(numbers), numbers])
        ones, counts, fingerprint = self._sums.unbind()
        labels, unsigned_labels = self._label_sums()
        return {
            "sites": tuple(on_device(maker.finish(), ones.device) for maker in self.makers.values()),
            "n": self.start - self.first,
            "ones": ones,
            "counts": counts,
            "fingerprint": fingerprint,
            "spans": Spans(((self.first, self.start),)),
            "labels": labels,
            "unsigned_labels": unsigned_labels,
        }


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a copy to a GPU does not block, a copy to the CPU must."""
    return tensor.to(device, non_blocking=device.type == "cuda")


# Making the sketch of one site


class TensorSketch:
    """Two independent sketches of f ⊗ g with `to` columns each (Pham and Pagh 2013).

    f and g are folded to `to` columns, each by its own hashes and signs, and the two are convolved: entry (i, j) of
    f ⊗ g goes to column h(i) + h′(j) with sign s(i) s′(j). Inner products are ⟨f, f′⟩⟨g, g′⟩ on average; products of
    one sketch with the other are unbiased, products of a sketch with itself are too large.
    """

    COPIES = 2

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.to = to
        self._of_f = [Fold(width, to, seed * 4 + 1_000_000 + copy) for copy in range(self.COPIES)]
        self._of_g = [Fold(width, to, seed * 4 + 1_000_002 + copy) for copy in range(self.COPIES)]

    def features(self, rows: Tensor) -> Tensor:
        """(copies, n, to // 2 + 1): the factor of the product that depends on f."""
        return torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_f]))

    def product(self, features: Tensor, rows: Tensor) -> Tensor:
        """(copies, n, to): the sketch of f ⊗ g, from `features` of f and the rows g."""
        of_g = torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_g]))
        return torch.fft.irfft(features * of_g, n=self.to)


def projection(width: int, folded: int | None, seed: int) -> Callable[[Tensor], Tensor]:
    """The projection of rows to fewer columns, the same for all data; None leaves rows as they are."""
    return (lambda rows: rows) if folded is None else Fold(width, folded, seed)


def plan_sites(
    widths: Collection[int], size: int | None, parts: frozenset[str], *, seed: int, memory: int, rows: int | None
) -> list[SiteMaker]:
    """A maker for every site; the widest sites are projected until all fit into the memory."""

    def makers_of(most: int) -> tuple[list[SiteMaker], int]:
        samplers: dict[int, RowSampler] = {}
        made = [SiteMaker(width, size, parts, seed, most if width > most else None, samplers) for width in widths]
        return made, sum(maker.bytes(rows) for maker in made)

    most = max(widths)
    makers, need = makers_of(most)
    if need > memory and size is None:
        raise MemoryError(
            f"keeping every row would take {size_text(need)}, over the budget of {size_text(memory)}: "
            "give a size, raise memory=, pool with rows='mean', or take fewer sites"
        )
    least = need
    while size is not None and least > memory and most > size:
        most //= 2
        makers, least = makers_of(most)
    if least > memory:
        projected = f" and {size_text(least)} with rows projected to {most} columns," if least < need else ""
        raise MemoryError(
            f"the sketch would take {size_text(need)},{projected} over the budget of {size_text(memory)}: raise "
            "memory=, take a smaller size, kernels='hadamard' alone, or fewer sites"
        )
    return makers


class SiteMaker:
    """Grows the sketch of one site: a chunk's features before its gradients, and chunks in the order of their rows."""

    def __init__(
        self,
        width: int,
        size: int | None,
        parts: frozenset[str],
        seed: int,
        folded: int | None,
        samplers: dict[int, RowSampler],
    ) -> None:
        """`folded` is the number of columns that rows are projected to; None leaves rows as they are.

        All sites share `samplers`, keyed by the number of rows they keep, so that each draw is made once.
        """
        self.width, self.size, self.parts, self.seed = width, size, parts, seed
        self.columns = width if folded is None else folded
        self.with_gradients = bool(parts & {"gradients", "hadamard", "maps"})
        self.paired_rows = max(FEWEST_PAIRED, min(MOST_PAIRED, PAIR_NUMBERS // self.columns))
        self._sampler = samplers.setdefault(self.paired_rows, RowSampler(self.paired_rows, seed))
        self._project = projection(width, folded, seed)
        self._tensor = TensorSketch(width, size, seed) if size is not None and "hadamard" in parts else None
        self._parts: dict[str, Part] = {}
        self._all: dict[str, list[Part]] = {}  # of each chunk, where every row is kept
        self._pairs: list[Pairs] = []
        self._sums: dict[str, Tensor] = {}
        self._pending: tuple[Tensor, Tensor, Tensor, Tensor | None]  # a chunk's features, until its gradients come

    def bytes(self, rows: int | None) -> int:
        """The most memory that the sketch takes; `rows` is the number of rows, if that is known."""
        height = self.size if self.size is not None else rows or 0
        total = 4 * height * self.columns * len(self.parts & {"features", "gradients", "maps"})
        if self._tensor is not None:
            total += 4 * height * self._tensor.to * TensorSketch.COPIES
        if self.with_gradients:
            total += 8 * self.paired_rows * self.columns
            total += 8 * self.columns**2 if self.columns <= MOMENT else 0
        return total

    def features(self, rows: Tensor, drawn: Placement | None) -> Tensor:
        """Take the rows f of a chunk and return their ‖f‖²; `drawn` has their buckets, None if every row is kept."""
        squares, narrow = _squares(rows), self._project(rows)
        if "features" in self.parts:
            self._grow("features", narrow, squares, drawn)
        if self.with_gradients:
            self._pending = rows, narrow, squares, None if self._tensor is None else self._tensor.features(rows)
        return squares

    def gradients(self, rows: Tensor, drawn: Placement | None, start: int) -> Tensor:
        """Take the rows g of the same chunk, the first of global index `start`, and return their ‖g‖²."""
        f, narrow_f, squares_f, spectra = self._pending
        del self._pending
        squares, narrow = _squares(rows), self._project(rows)
        of_both = squares_f * squares
        self._sum("fourth", of_both.square().sum())
        self._sum("trace", of_both.sum())
        if "gradients" in self.parts:
            self._grow("gradients", narrow, squares, drawn)
        if "maps" in self.parts:
            maps = f * rows
            self._grow("maps", self._project(maps), _squares(maps), drawn)
        if self._tensor is not None and spectra is not None:
            self._grow("hadamard", self._tensor.product(spectra, rows), of_both, drawn)
        if self.columns <= MOMENT:
            self._sum("moment", (narrow.T @ narrow_f).double())
        index = self._sampler.draw(start, len(rows))
        if len(index):
            take = torch.from_numpy(index - start).to(rows.device, non_blocking=True)
            self._pairs.append(Pairs(narrow_f[take], narrow[take], index, self.paired_rows, self.seed))
        if sum(len(sample.index) for sample in self._pairs) > 2 * self.paired_rows:
            self._pairs = [self._pairs[0].merge(*self._pairs[1:])]
        return squares

    def _sum(self, name: str, number: Tensor) -> None:
        self._sums[name] = self._sums[name].add_(number) if name in self._sums else number

    def _grow(self, name: str, rows: Tensor, squares: Tensor, drawn: Placement | None) -> None:
        """Add rows (n, k), or (2, n, k) in two copies, to a part."""
        # Products with ones, since summing float32 in float64 takes longer than all the rest; a few rows at a time,
        # since rounding would look like variation about the mean.
        total = torch.stack([(rows.new_ones(few.shape[-2]) @ few).double() for few in rows.split(_SUMMED, -2)]).sum(0)
        if drawn is None or self.size is None:
            self._all.setdefault(name, []).append(Part(rows.clone(), total, squares.sum(), squares))
            return
        if name not in self._parts:
            empty = rows.new_zeros(*rows.shape[:-2], self.size, rows.shape[-1])
            zero = torch.zeros_like(squares[0])
            self._parts[name] = Part(empty, torch.zeros_like(total), zero, zero.repeat(self.size))
        part = self._parts[name]
        part.total.add_(total)
        part.squares.add_(squares.sum())
        for sums, copy in zip(*(t if t.ndim == 3 else t[None] for t in (part.rows, rows)), strict=True):
            drawn.add(sums, copy)
        drawn.add(part.diagonal, squares)

    def finish(self) -> SiteSketch:
        for name, chunks in self._all.items():
            self._parts[name] = Part.of_all(chunks)
        parts: dict[str, Part | None] = {name: self._parts.get(name) for name in PARTS}
        sums = {name: self._sums.get(name) for name in ("fourth", "moment", "trace")}
        pairs = self._pairs[0].merge(*self._pairs[1:]) if self.with_gradients else None
        return SiteSketch(self.width, **parts, **sums, pairs=pairs)  # type: ignore[arg-type]


def _squares(rows: Tensor) -> Tensor:
    """(n,) ‖row‖², without a copy of the rows."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()
