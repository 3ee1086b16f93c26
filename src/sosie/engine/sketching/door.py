"""The door to sketching: a model and data in, one pass, a sketch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...capture import BETA, Chunk, Loss, Rule, check_rule, input_numbers, labels_of, predictive_of
from ...results import Side
from ...stats import Buckets, Drawn, SiteMaker, Sketch, Spans, check_seed, parts_of, plan_forms
from ..plan import MEMORY, parse_size
from ..provenance import provenance
from ..stream import Stream, rows_per_input
from .source import GradientSource, read_through, source_of

SIZE = 512
MOST_CLASSES = 2**15  # whole numbers from there on are no labels; a column for each would take too much
KERNELS = ("features", "gradients", "hadamard")


def sketch(
    model: Any,
    data: Any,
    *,
    sites: Any = None,
    size: int | None = SIZE,
    seed: int = 0,
    kernels: str | Sequence[str] = KERNELS,
    rows: Rule = "flatten",
    output: str | Loss = "logits",
    beta: float = BETA,
    stack: int = 1,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    first_row: int = 0,
) -> Sketch:
    """Features and gradients of a model at every site, sketched to `size` rows in one forward and one backward pass.

    The gradient at a site is that of the loss expected under the model's own prediction tempered by `beta`, q ∝ p^β,
    so that no labels are needed. `output`: "logits", "gaussian" (the model answers a mean and a log-variance), or a
    function(answer, batch) → one loss an input. Gradients become rows by the same rule as features.

    `size`: buckets that rows are added up in with signs (CountSketch), `stack` of them on top of each other;
    None keeps every row, which is exact and grows with the data. `seed` and a row's index decide its bucket and
    sign: two models on the same data share them and can be compared with `sosie.compare`.
    `kernels`: what the sketch is to supply; see `sosie.compare(..., kernel=)`. Labels, where the batches have them,
    are sketched along, for `classify`. `memory`: the budget; sites too wide for it are projected, and say so.
    `first_row`: index of the first input where the data are one part of a larger set, to be merged.
    `sites`, `prepare`, `inputs`, `device`, `max_rows`: as in `sosie.compare`.
    """
    check_rule(rows)
    if data is None:
        raise TypeError("a model is sketched on data: sketch(model, data)")
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels or ())
    parts = parts_of(names)
    if size is None and "hadamard" in parts:
        parts = (parts - {"hadamard"}) | {"features", "gradients"}  # the product itself is at hand
    buckets = None if size is None else Buckets(size, seed, stack)
    if size is None and stack != 1:
        raise ValueError(f"size=None keeps every row as it is, so that there is nothing to stack: got stack={stack}")
    check_seed(seed)
    if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 1):
        raise ValueError(f"max_rows must be a whole number, at least 1, got {max_rows}")
    if not isinstance(first_row, int) or not 0 <= first_row < 2**40:
        raise ValueError(f"first_row must be a whole number from 0 on, below 2^40, got {first_row}")
    source = source_of(
        model, sites, rows, prepare=prepare, inputs=inputs, device=device, predictive=predictive_of(output, beta)
    )
    with source.opened():
        stream = Stream.of(data, [source])
        side = source.look(stream.first)
        each = rows_per_input([source])
        known = None if stream.total is None else min(stream.total, max_rows or stream.total)
        forms = plan_forms(
            side.widths,
            size,
            parts,
            seed=seed,
            memory=MEMORY if memory is None else parse_size(memory) or MEMORY,
            rows=None if known is None else known * each,
        )
        run = Run(source, side, {site: SiteMaker(form) for site, form in zip(side.sites, forms, strict=True)}, buckets)
        run.start = first_row * each
        read_through(source, stream, run.take, task=f"sketching {source.name}", max_rows=max_rows)
        found = run.finish(first_row * each)
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    settings = {"size": size, "seed": seed, "stack": stack, "rows": rule, "device": str(device or "the model's own")}
    about = provenance(settings=settings, models=[source.describe()], data=data)
    return Sketch(
        side=side,
        size=size,
        seed=seed,
        stack=stack,
        rows_rule=rule,
        output=source.predictive.describe() if run.backwards else "none",
        model=source.digest(),
        about={**about, "inputs": run.inputs},
        **found,
    )


class Run:
    """One pass: every chunk forwards, and backwards where gradients are wanted."""

    def __init__(
        self, source: GradientSource, side: Side, makers: dict[str, SiteMaker], buckets: Buckets | None
    ) -> None:
        self.source, self.side, self.makers, self.buckets = source, side, makers, buckets
        self.backwards = any(maker.form.with_gradients for maker in makers.values())
        self.start = 0  # global index of the next row
        self.inputs = 0
        self._drawn: Drawn | None = None
        self._rows = 0
        height = 0 if buckets is None else buckets.size
        self._ones, self._counts, self._fingerprint = (torch.zeros(height, dtype=torch.float64) for _ in range(3))
        self._labels: tuple[Tensor, Tensor] | None = None
        self._labelled = True
        self._kept: list[tuple[Tensor, Tensor | None]] = []

    def take(self, chunk: Chunk) -> None:
        self._drawn, self._rows = None, 0
        self.source.read_rows(chunk, self._features, self._gradients if self.backwards else None)
        self._shared(chunk)
        self.start += self._rows
        self.inputs += chunk.count

    def _features(self, site: str, rows: Tensor) -> None:
        if not self._rows:
            self._rows = len(rows)
            if self.buckets is not None:
                drawn = Drawn(*self.buckets.draw(self.start, len(rows)))
                self._drawn = drawn.to(rows)
        elif len(rows) != self._rows:
            raise ValueError(f"need as many rows at every site, got {self._rows} and, at {site}, {len(rows)}")
        lengths = self.makers[site].features(rows, self._drawn)  # not finite where a row is not
        self.source.note_finite(f"the activations at {site} are", lengths)

    def _gradients(self, site: str, rows: Tensor) -> None:
        with torch.no_grad():
            lengths = self.makers[site].gradients(rows, self._drawn, self.start)
            self.source.note_finite(f"the gradients at {site} are", lengths)

    def _shared(self, chunk: Chunk) -> None:
        """What all sites share: the sketch of ones, of the fingerprint, and of the labels."""
        numbers = input_numbers(chunk.batch, chunk.count)
        for counts in list(self.source.counts().values())[:1]:  # positions: each input's number at its first row
            counts = counts.cpu()
            shown = counts > 0
            first = (counts.cumsum(0) - counts)[shown]
            numbers = numbers.new_zeros(self._rows).index_put_((first,), numbers[shown])
        labels = labels_of(chunk.batch)
        self._labelled &= labels is not None and self._rows == chunk.count
        coded = None
        if self._labelled and labels is not None:
            if int(labels.min()) < 0 or int(labels.max()) >= MOST_CLASSES:
                self._labelled = False  # numbers, but not of classes
            else:
                coded = torch.nn.functional.one_hot(labels.cpu().long()).double()
        if self.buckets is None:
            self._kept.append((numbers, coded))
            return
        drawn = Drawn(*self.buckets.draw(self.start, self._rows))
        ones = torch.ones(self._rows, dtype=torch.float64)
        drawn.add(self._ones, ones)
        drawn.add_unsigned(self._counts, ones)
        drawn.add(self._fingerprint, numbers)
        if coded is not None:
            self._add_labels(drawn, coded)

    def _add_labels(self, drawn: Drawn, coded: Tensor) -> None:
        assert self.buckets is not None
        if self._labels is None:
            empty = torch.zeros(self.buckets.size, 0, dtype=torch.float64)
            self._labels = empty, empty.clone()
        classes = max(coded.shape[1], self._labels[0].shape[1])
        signed, unsigned = (torch.nn.functional.pad(t, (0, classes - t.shape[1])) for t in self._labels)
        coded = torch.nn.functional.pad(coded, (0, classes - coded.shape[1]))
        drawn.add(signed, coded)
        drawn.add_unsigned(unsigned, coded)
        self._labels = signed, unsigned

    def finish(self, first: int) -> dict[str, Any]:
        """The fields of a sketch that the pass has filled."""
        labels = self._labels if self._labelled else None
        if self.buckets is None:
            self._fingerprint = torch.cat([numbers for numbers, _ in self._kept])
            self._ones = self._counts = torch.ones_like(self._fingerprint)
            if self._labelled:
                classes = max(coded.shape[1] for _, coded in self._kept if coded is not None)
                lots = [torch.nn.functional.pad(c, (0, classes - c.shape[1])) for _, c in self._kept if c is not None]
                labels = torch.cat(lots), torch.cat(lots)
        return {
            "sites": tuple(_on_cpu(self.makers[site].finish()) for site in self.side.sites),
            "n": self.start - first,
            "ones": self._ones,
            "counts": self._counts,
            "fingerprint": self._fingerprint,
            "spans": Spans(((first, self.start),)),
            "labels": None if labels is None else labels[0],
            "unsigned_labels": None if labels is None else labels[1],
        }


def _on_cpu(site: Any) -> Any:
    from ...stats.storage import on_device

    return on_device(site, torch.device("cpu"))
