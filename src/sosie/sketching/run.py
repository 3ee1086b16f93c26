"""Making a sketch: a model and data in, one pass, a sketch out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..capture import Chunk, Rule, check_rule, labels_of
from ..engine.plan import MEMORY, parse_size, size_text
from ..engine.provenance import provenance
from ..engine.stream import Stream, rows_per_input
from ..linalg import for_numpy
from ..process_state import products
from ..stats import Buckets, Drawn, RowSampler, check_seed, on_device
from ..stats.sample import Fold
from .gradients import BETA, GradientNetwork, Loss, input_numbers, predictive_of
from .kernels import KERNELS
from .sketches import PARTS, Pairs, Part, SiteSketch, Sketch, Spans

SIZE = 512
DEFAULT_KERNELS = ("features", "gradients", "hadamard")
MOST_CLASSES = 2**15  # larger whole numbers are not taken for labels: a column for each would take too much memory
MOMENT = 1024  # neurons up to which Σ g fᵀ is kept whole
PAIR_NUMBERS = 2**23  # numbers of each of f and g that are kept for pairs of rows
MOST_PAIRED, FEWEST_PAIRED = 512, 64  # rows that are kept for them
_SUMMED = 256  # rows that are added up in their own precision
WAITING = 2**16  # labels that are collected before they are added up


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
    """Features and gradients of a model at every site, sketched to `size` rows in one forward and one backward pass.

    The gradient at a site is that of the loss expected under the model's own prediction tempered by `beta`, q ∝ p^β,
    so that no labels are needed. `output`: "logits", "gaussian" (the model answers a mean and a log-variance), or a
    function(answer, batch) → one loss per input. Gradients become rows by the same rule as features.

    `size`: the number of buckets that rows are added up in, with signs (CountSketch); each row is in `stack` of them.
    None keeps every row, which is exact and grows with the data. `seed` and a row's index decide its bucket and
    sign: two models on the same data share them and can be compared with `sosie.compare`.
    `kernels`: what the sketch supplies; see `Sketch.using`. Labels, where the batches have them, are
    sketched too, for `classify`. `memory`: the budget; sites too wide for it are projected, with a caveat.
    `data`: as in `sosie.compare`; sketches of parts of the data (`sosie.data.DataPart`) can be merged.
    `sites`, `prepare`, `inputs`, `device`, `max_rows`: as in `sosie.compare`. The sketch stays on the device that the
    model ran on; `sketch.to("cpu")` moves it.
    """
    check_rule(rows)
    if data is None:
        raise TypeError("a model is sketched on data: sketch(model, data)")
    parts = parts_of(kernels)
    if size is None and "hadamard" in parts:
        parts = (parts - {"hadamard"}) | {"features", "gradients"}  # the product is computed from the rows themselves
    if size is None and stack != 1:
        raise ValueError(f"size=None keeps every row as it is, so there is nothing to stack: got stack={stack}")
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
        each = rows_per_input([network])
        known = None if stream.expected is None else stream.expected * each
        budget = MEMORY if memory is None else parse_size(memory) or MEMORY
        forms = plan_forms(side.widths, size, parts, seed=seed, memory=budget, rows=known)
        run = Run(network, dict(zip(side.sites, forms, strict=True)), buckets, stream.first_row * each)
        for chunk in network.chunks(stream, task="sketching"):
            run.take(chunk)
        mixing = mixing or network.mixing_in_pass()
        fields = run.finish()
        digest = network.digest()
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    settings = {"size": size, "seed": seed, "stack": stack, "rows": rule, "device": str(device or "the model's own")}
    about = provenance(settings=settings, models=[network.describe()], data=data, mixing=mixing)
    return Sketch(
        side=side,
        size=size,
        seed=seed,
        stack=stack,
        rows_rule=rule,
        output=predictive.words if run.backwards else "none",
        model=digest,
        about={**about, "inputs": run.inputs},
        **fields,
    )


def parts_of(kernels: str | Sequence[str]) -> frozenset[str]:
    """The parts of a site that must be sketched for these kernels."""
    names = [kernels] if isinstance(kernels, str) else list(kernels or ())
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"no kernel is called {name!r}; there are {', '.join(KERNELS)}")
    if not names:
        raise ValueError(f"a sketch needs at least one kernel of {', '.join(KERNELS)}")
    return frozenset().union(*({name} if name in PARTS else {"features", "gradients"} for name in names))


class Run:
    """Sketches chunk after chunk, with a backward pass where gradients are needed; sums stay on the model's device."""

    def __init__(
        self, network: GradientNetwork, forms: dict[str, SiteForm], buckets: Buckets | None, first: int
    ) -> None:
        """`first`: global index of the first row."""
        self.network, self.buckets = network, buckets
        samplers: dict[int, RowSampler] = {}
        self.makers = {site: SiteMaker(form, samplers) for site, form in forms.items()}
        self.backwards = any(form.with_gradients for form in forms.values())
        self.first = self.start = first  # of all rows, and of those of the next chunk
        self.inputs = 0
        self._device = torch.device("cpu")
        self._drawn: Drawn | None = None
        self._rows = 0
        self._sums: Tensor | None = None  # (3, M): of ones, of ones without signs, of the fingerprint
        self._numbers: list[Tensor] = []  # of the fingerprint, where every row is kept
        # Labels are added up many at a time, since reading them synchronises a GPU. None: some row has none.
        self._labels: list[Tensor] | None = []
        self._label_sums: tuple[Tensor, Tensor] | None = None  # (M, classes) with the signs of the sketch, and without
        self._labelled = first  # rows up to which labels have been added up

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
                self._drawn = Drawn(*self.buckets.draw(self.start, len(rows), rows.device))
        elif len(rows) != self._rows:
            raise ValueError(f"need the same number of rows at every site, got {self._rows}, and {len(rows)} at {site}")
        lengths = self.makers[site].features(rows, self._drawn)  # not finite where a row is not
        self.network.note_finite(f"the activations at {site} are", lengths)

    def _gradients(self, site: str, rows: Tensor) -> None:
        with torch.no_grad():
            lengths = self.makers[site].gradients(rows, self._drawn, self.start)
            self.network.note_finite(f"the gradients at {site} are", lengths)

    def _shared(self, chunk: Chunk) -> None:
        """Sketch what all sites share: ones, the fingerprint, and the labels."""
        numbers = input_numbers(chunk.batch, chunk.count, self._device)
        for counts in list(self.network.counts().values())[:1]:  # positions: each input's number at its first row
            counts = _moved(counts, self._device)
            first = counts.cumsum(0) - counts
            first = torch.where(counts > 0, first, self._rows)  # an input without rows goes past the end
            numbers = numbers.new_zeros(self._rows + 1).index_put_((first,), numbers)[: self._rows]
        labels = labels_of(chunk.batch)
        if self._labels is None or labels is None or self._rows != chunk.count:
            self._labels = None
        else:
            self._labels.append(_moved(labels, self._device).long())
            if self.buckets is not None and sum(map(len, self._labels)) >= WAITING:
                self._add_labels()
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

    def _add_labels(self) -> None:
        """Add up the collected labels, one column per class; if some cannot be classes, the sketch has no labels."""
        assert self._labels is not None
        labels, self._labels = torch.cat(self._labels), []
        least, most = torch.stack([labels.min(), labels.max()]).tolist()
        if not 0 <= least <= most < MOST_CLASSES:
            self._labels = None
        elif self.buckets is None:
            coded = one_hot(labels).double()
            self._label_sums = coded, coded
        else:
            empty = labels.new_zeros(self.buckets.size, 0, dtype=torch.float64)
            tables = self._label_sums or (empty, empty)
            classes = max(most + 1, tables[0].shape[1])
            signed, unsigned = (pad(table, (0, classes - table.shape[1])) for table in tables)
            places, signs = self.buckets.draw(self._labelled, len(labels), labels.device)
            places = places * classes + labels
            signed.view(-1).index_add_(0, places.flatten(), signs.flatten())
            unsigned.view(-1).index_add_(0, places.flatten(), signs.abs().flatten())
            self._label_sums = signed, unsigned
        self._labelled += len(labels)

    @products()
    def finish(self) -> dict[str, Any]:
        """The fields of a sketch that come from the pass, all on one device."""
        if self._sums is None:
            numbers = torch.cat(self._numbers)
            self._sums = torch.stack([torch.ones_like(numbers), torch.ones_like(numbers), numbers])
        ones, counts, fingerprint = self._sums.unbind()
        if self._labels:
            self._add_labels()
        labels, unsigned_labels = (self._labels is not None and self._label_sums) or (None, None)
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
    """The tensor on a device; a copy to a GPU does not block, one to the CPU has to."""
    return tensor.to(device, non_blocking=device.type == "cuda")


# How a site is sketched


class TensorSketch:
    """Two independent sketches of f ⊗ g of `to` columns each (Pham and Pagh 2013).

    f and g are folded to `to` columns, each by hashes and signs of its own, and the two are convolved: entry (i, j) of
    f ⊗ g goes to column h(i) + h′(j) with sign s(i) s′(j). Inner products are ⟨f, f′⟩⟨g, g′⟩ on average; products of
    one sketch with the other are unbiased, those of a sketch with itself are too large.
    """

    COPIES = 2

    def __init__(self, width: int, to: int, seed: int = 0) -> None:
        self.to = to
        self._of_f = [Fold(width, to, seed * 4 + 1_000_000 + copy) for copy in range(self.COPIES)]
        self._of_g = [Fold(width, to, seed * 4 + 1_000_002 + copy) for copy in range(self.COPIES)]

    def features(self, rows: Tensor) -> Tensor:
        """(copies, n, to // 2 + 1): what is kept of f until g is known."""
        return torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_f]))

    def product(self, features: Tensor, rows: Tensor) -> Tensor:
        """(copies, n, to): the sketch of f ⊗ g, from `features` of f and the rows g."""
        of_g = torch.fft.rfft(torch.stack([fold(rows) for fold in self._of_g]))
        return torch.fft.irfft(features * of_g, n=self.to)


@dataclass(frozen=True)
class SiteForm:
    """How a site is sketched."""

    width: int
    size: int | None  # buckets; None: every row is kept
    parts: frozenset[str]
    seed: int = 0
    fold: int | None = None  # columns that its rows are projected to; None: they are not

    @property
    def columns(self) -> int:
        return self.width if self.fold is None else self.fold

    @property
    def paired_rows(self) -> int:
        return max(FEWEST_PAIRED, min(MOST_PAIRED, PAIR_NUMBERS // self.columns))

    @property
    def with_gradients(self) -> bool:
        return bool(self.parts & {"gradients", "hadamard", "maps"})

    def bytes(self, rows: int | None) -> int:
        """The memory it takes at most, for that many rows where all are kept."""
        height = self.size if self.size is not None else rows or 0
        total = 4 * height * self.columns * len(self.parts & {"features", "gradients", "maps"})
        if "hadamard" in self.parts and self.size is not None:
            total += 4 * height * self.size * TensorSketch.COPIES
        if self.with_gradients:
            total += 8 * self.paired_rows * self.columns
            total += 8 * self.columns**2 if self.columns <= MOMENT else 0
        return total

    def project(self) -> Callable[[Tensor], Tensor]:
        """The projection of its rows to fewer columns, if they are too wide; the same for all data."""
        return (lambda rows: rows) if self.fold is None else Fold(self.width, self.fold, self.seed)

    def tensor_sketch(self) -> TensorSketch | None:
        """The sketch of f ⊗ g, if it is a part; the same for all data."""
        if self.size is None or "hadamard" not in self.parts:
            return None
        return TensorSketch(self.width, self.size, self.seed)


def plan_forms(
    widths: Collection[int], size: int | None, parts: frozenset[str], *, seed: int, memory: int, rows: int | None
) -> list[SiteForm]:
    """A form for every site; the widest sites are projected until all fit into the memory."""
    forms = [SiteForm(width, size, parts, seed) for width in widths]
    need = least = sum(form.bytes(rows) for form in forms)
    if need <= memory:
        return forms
    if size is None:
        raise MemoryError(
            f"keeping every row would take {size_text(need)}, over the budget of {size_text(memory)}: "
            "give a size, raise memory=, pool with rows='mean', or take fewer sites"
        )
    to = max(widths)
    while to > size:
        to //= 2
        forms = [SiteForm(width, size, parts, seed, to if width > to else None) for width in widths]
        least = sum(form.bytes(rows) for form in forms)
        if least <= memory:
            return forms
    projected = f" and {size_text(least)} with rows projected to {to} columns," if least < need else ""
    raise MemoryError(
        f"the sketch would take {size_text(need)},{projected} over the budget of {size_text(memory)}: raise "
        "memory=, take a smaller size, kernels='hadamard' alone, or fewer sites"
    )


class SiteMaker:
    """Grows one site's sketch; features of a chunk come before its gradients, and chunks in the order of their rows."""

    def __init__(self, form: SiteForm, samplers: dict[int, RowSampler]) -> None:
        """`samplers`: by the number of rows they keep, shared by all sites, so that each draw is made once."""
        self.form = form
        self._sampler = samplers.setdefault(form.paired_rows, RowSampler(form.paired_rows, form.seed))
        self._project, self._tensor = form.project(), form.tensor_sketch()
        self._parts: dict[str, Part] = {}
        self._all: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in PARTS}  # where every row is kept
        self._pairs: list[Pairs] = []
        self._sums: dict[str, Tensor] = {}
        self._waiting: tuple[Tensor, Tensor, Tensor, Tensor | None]  # a chunk's features, until it has gradients

    def features(self, rows: Tensor, drawn: Drawn | None) -> Tensor:
        """Take the rows f of a chunk and return their ‖f‖²; `drawn`: their buckets, None where all are kept."""
        squares, narrow = _squares(rows), self._project(rows)
        if "features" in self.form.parts:
            self._grow("features", narrow, squares, drawn)
        if self.form.with_gradients:
            self._waiting = rows, narrow, squares, None if self._tensor is None else self._tensor.features(rows)
        return squares

    def gradients(self, rows: Tensor, drawn: Drawn | None, start: int) -> Tensor:
        """Take the rows g of the same chunk, whose first has the global index `start`, and return their ‖g‖²."""
        f, narrow_f, squares_f, spectra = self._waiting
        del self._waiting
        squares, narrow = _squares(rows), self._project(rows)
        of_both = squares_f * squares
        self._sum("inner", _inner(f, rows).double().square().sum())
        self._sum("fourth", of_both.square().sum())
        self._sum("trace", of_both.sum())
        if "gradients" in self.form.parts:
            self._grow("gradients", narrow, squares, drawn)
        if "maps" in self.form.parts:
            maps = f * rows
            self._grow("maps", self._project(maps), _squares(maps), drawn)
        if self._tensor is not None:
            assert spectra is not None
            self._grow("hadamard", self._tensor.product(spectra, rows), of_both, drawn)
        if self.form.columns <= MOMENT:
            self._sum("moment", (narrow.T @ narrow_f).double())
        most = self.form.paired_rows
        index = self._sampler.draw(start, len(rows))
        if len(index):
            take = torch.from_numpy(index - start).to(rows.device, non_blocking=True)
            self._pairs.append(Pairs(narrow_f[take], narrow[take], index, most, self.form.seed))
        if sum(len(lot.index) for lot in self._pairs) > 2 * most:
            self._pairs = [self._pairs[0].merge(*self._pairs[1:])]
        return squares

    def _sum(self, name: str, number: Tensor) -> None:
        self._sums[name] = self._sums[name].add_(number) if name in self._sums else number

    def _grow(self, name: str, rows: Tensor, squares: Tensor, drawn: Drawn | None) -> None:
        """Add rows (n, k), or (2, n, k) in two copies, to a part."""
        # Products with ones, since summing float32 in float64 takes longer than all the rest; a few rows at a time,
        # since rounding would look like variation about the mean.
        total = torch.stack([(rows.new_ones(few.shape[-2]) @ few).double() for few in rows.split(_SUMMED, -2)]).sum(0)
        if name not in self._parts:
            shape = (*rows.shape[:-2], self.form.size or 0, rows.shape[-1])
            diagonal = squares.new_zeros(self.form.size or 0)
            zero = torch.zeros_like(squares[0])
            self._parts[name] = Part(rows.new_zeros(shape), torch.zeros_like(total), zero, diagonal)
        part = self._parts[name]
        part.total.add_(total)
        part.squares.add_(squares.sum())
        if drawn is None:
            self._all[name].append((rows.clone(), squares))
            return
        for whole, copy in zip(*(t if t.ndim == 3 else t[None] for t in (part.rows, rows)), strict=True):
            drawn.add(whole, copy)
        drawn.add(part.diagonal, squares)

    def finish(self) -> SiteSketch:
        parts: dict[str, Part | None] = {name: self._parts.get(name) for name in PARTS}
        for name, part in self._parts.items():
            if self.form.size is None:
                rows, diagonal = zip(*self._all[name], strict=True)
                parts[name] = replace(part, rows=torch.cat(rows, -2), diagonal=torch.cat(diagonal))
        sums = {name: self._sums.get(name) for name in ("inner", "fourth", "moment", "trace")}
        pairs = self._pairs[0].merge(*self._pairs[1:]) if self.form.with_gradients else None
        return SiteSketch(self.form.width, **parts, **sums, pairs=pairs)  # type: ignore[arg-type]


def _squares(rows: Tensor) -> Tensor:
    """(n,) ‖row‖², without a copy of the rows."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()


def _inner(f: Tensor, g: Tensor) -> Tensor:
    """(n,) ⟨f, g⟩ of each row."""
    if not for_numpy(f) or not for_numpy(g) or f.dtype != g.dtype:
        return (f * g).sum(1)
    with np.errstate(all="ignore"):  # numbers that are not finite are reported by `note_finite`
        return torch.from_numpy(np.einsum("ij,ij->i", f.numpy(), g.numpy()))
