"""Making a sketch: a model and data in, one pass, a sketch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..capture import Chunk, Rule, check_rule, labels_of
from ..checks import whole_number
from ..engine.plan import MEMORY, parse_size
from ..engine.provenance import provenance
from ..engine.stream import Stream, rows_per_input
from ..process_state import products
from ..stats import Buckets, Drawn, RowSampler, check_seed, on_device
from .gradients import BETA, GradientNetwork, Loss, input_numbers, predictive_of
from .site import SiteForm, SiteMaker, plan_forms
from .sketches import Sketch, Spans, parts_of

SIZE = 512
KERNELS = ("features", "gradients", "hadamard")
MOST_CLASSES = 2**15  # whole numbers from there on are no labels; a column for each would take too much
WAITING = 2**16  # labels that wait until they are looked at


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
    function(answer, batch) → one loss per input. Gradients become rows by the same rule as features.

    `size`: buckets that rows are added up in with signs (CountSketch), `stack` of them on top of each other;
    None keeps every row, which is exact and grows with the data. `seed` and a row's index decide its bucket and
    sign: two models on the same data share them and can be compared with `sosie.compare`.
    `kernels`: what the sketch is to supply; see `sosie.compare(..., kernel=)`. Labels, where the batches have them,
    are sketched along, for `classify`. `memory`: the budget; sites too wide for it are projected, and say so.
    `first_row`: index of the first input where the data are one part of a larger set, to be merged.
    `sites`, `prepare`, `inputs`, `device`, `max_rows`: as in `sosie.compare`. The sketch stays on the device that the
    model ran on, where what is made of it is made; `sketch.to("cpu")` moves it.
    """
    check_rule(rows)
    if data is None:
        raise TypeError("a model is sketched on data: sketch(model, data)")
    parts = parts_of((kernels,) if isinstance(kernels, str) else tuple(kernels or ()))
    if size is None and "hadamard" in parts:
        parts = (parts - {"hadamard"}) | {"features", "gradients"}  # the product itself is at hand
    if size is None and stack != 1:
        raise ValueError(f"size=None keeps every row as it is, so there is nothing to stack: got stack={stack}")
    buckets = None if size is None else Buckets(size, seed, stack)
    check_seed(seed)
    whole_number(first_row, "first_row", least=0, most=2**40 - 1)
    predictive = predictive_of(output, beta)
    options: dict[str, Any] = {"sites": sites, "rows": rows, "prepare": prepare, "inputs": inputs, "device": device}
    network = GradientNetwork.of(model, predictive=predictive, **options)
    with network.opened():
        stream = Stream.of(data, [network], max_rows)
        side = network.look(stream.first)
        mixing = network.mixing(stream.first)
        each = rows_per_input([network])
        known = None if stream.expected is None else stream.expected * each
        budget = MEMORY if memory is None else parse_size(memory) or MEMORY
        forms = plan_forms(side.widths, size, parts, seed=seed, memory=budget, rows=known)
        run = Run(network, dict(zip(side.sites, forms, strict=True)), buckets, first_row * each)
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


class Run:
    """Every chunk forwards, and backwards where gradients are wanted; all sums stay on the model's device."""

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
        # Labels are looked at many at a time, since a GPU must be waited for. None: some row has none.
        self._labels: list[Tensor] | None = []
        self._label_sums: tuple[Tensor, Tensor] | None = None  # (M, classes) with the signs of the sketch, and without
        self._labelled = first  # rows up to which labels are summed up

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
            raise ValueError(f"need as many rows at every site, got {self._rows} and, at {site}, {len(rows)}")
        lengths = self.makers[site].features(rows, self._drawn)  # not finite where a row is not
        self.network.note_finite(f"the activations at {site} are", lengths)

    def _gradients(self, site: str, rows: Tensor) -> None:
        with torch.no_grad():
            lengths = self.makers[site].gradients(rows, self._drawn, self.start)
            self.network.note_finite(f"the gradients at {site} are", lengths)

    def _shared(self, chunk: Chunk) -> None:
        """What all sites share: the sketch of ones, of the fingerprint, and of the labels."""
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
        """Sum up the labels that wait, one column per class; whole numbers that are no classes mean no labels."""
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
        """The fields of a sketch that the pass has filled, all on one device."""
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
    """On a device; a GPU is not waited for, a CPU must wait for what comes from one."""
    return tensor.to(device, non_blocking=device.type == "cuda")
