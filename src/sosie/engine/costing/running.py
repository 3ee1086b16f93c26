"""One run of a measure on a pair of models, in parts that can be counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...capture import Chunk, Rule, as_found, borrowed, model_arguments, to_rows, watch
from ...measures import Measure
from ...process_state import products
from ...results import Comparison
from ...stats import BLOCK, Alignment, Atoms, Lottery, MomentMaker, Moments, Sample, SampleMaker
from ..pairwise import check_widths, view_of
from ..plan import Widths, make_plan
from ..weights import compare_weights

FORWARD, MEASURE = "forward", "measure"  # the parts of a run

Part = Callable[[str], AbstractContextManager[Any]]


def not_counted(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Run(Protocol):
    """A measure ready to be run as often as one likes."""

    statistic: str  # what the values rest on
    sites: int

    def __call__(self, part: Part = not_counted) -> Tensor:
        """One value a site; `part` is told what is being done."""
        ...


@dataclass
class Watched:
    """A model whose activations are read, in its whole forward."""

    model: nn.Module
    sites: Any
    rows: Rule
    prepare: Callable[[Any], Any] | None
    device: torch.device | None

    @contextmanager
    def opened(self) -> Iterator[Callable[[Chunk], list[Tensor]]]:
        """Rows of every site from a chunk of inputs."""
        count = 0

        def as_rows(site: Any, activation: Tensor) -> Tensor:
            return to_rows(activation, self.rows, site=site, inputs=count)

        with as_found(self.model, self.device), watch(self.model, self.sites, sink=as_rows) as seen:
            home = next(self.model.parameters()).device

            def read(chunk: Chunk) -> list[Tensor]:
                nonlocal count
                count = chunk.count
                args, kwargs = model_arguments(chunk.batch, model=self.model, prepare=self.prepare, device=home)
                self.model(*args, **kwargs)
                return seen.values()

            yield read


@dataclass
class ByProbes:
    """Both models run on the probes, and each site of one is compared with the same site of the other."""

    measure: Measure
    a: Watched
    b: Watched
    chunks: Sequence[Chunk]
    memory: int
    statistic: str = ""
    sites: int = 0

    def __call__(self, part: Part = not_counted) -> Tensor:
        pairs: list[_Pair] = []
        with ExitStack() as stack:
            stack.enter_context(borrowed([self.a.model, self.b.model]))
            read_a, read_b = (stack.enter_context(watched.opened()) for watched in (self.a, self.b))
            for chunk in self.chunks:
                with part(FORWARD):
                    rows_a, rows_b = read_a(chunk), read_b(chunk)
                if len(rows_a) != len(rows_b):
                    raise ValueError(f"need sites in pairs, got {len(rows_a)} and {len(rows_b)}")
                pairs = pairs or [self._pair(x, y, chunk) for x, y in zip(rows_a, rows_b, strict=True)]
                with part(MEASURE), products():
                    for pair, x, y in zip(pairs, rows_a, rows_b, strict=True):
                        pair.add(x, y)
            with part(MEASURE), products():
                values = [pair.value(self.measure) for pair in pairs]
        self.sites, self.statistic = len(pairs), "; ".join(dict.fromkeys(pair.kind for pair in pairs))
        return torch.stack([value.cpu() for value in values])

    def _pair(self, x: Tensor, y: Tensor, first: Chunk) -> _Pair:
        check_widths(self.measure, x.shape[1], y.shape[1])
        rows = len(x) * sum(chunk.count for chunk in self.chunks) // first.count
        widths = Widths((x.shape[1],), (y.shape[1],), rows)
        plan = make_plan(
            [self.measure], widths, memory=self.memory, exact=False, block=BLOCK, precision=None, blocks=False
        )
        kind = plan.kinds[self.measure.name]
        if kind == "moments":
            return _Pair(kind, MomentMaker(plan.products), MomentMaker(plan.products))
        lottery = Lottery(plan.sample_rows)
        return _Pair("all rows" if rows <= plan.sample_rows and plan.widest is None else "sampled rows",
                     SampleMaker(lottery, plan.widest), SampleMaker(lottery, plan.widest))  # fmt: skip


@dataclass
class _Pair:
    """The statistic of one pair of sites as it grows."""

    kind: str
    maker_a: Any
    maker_b: Any
    rows: int = 0
    total: Moments | None = None
    samples: tuple[Sample, ...] = ()

    def add(self, x: Tensor, y: Tensor) -> None:
        a = self.maker_a.side([self.maker_a.part("", x, self.rows)], self.rows)
        b = self.maker_b.side([self.maker_b.part("", y, self.rows)], self.rows)
        if self.kind == "moments":
            part = Moments.join(a, b)
            self.total = part if self.total is None else self.total.merge(part)
        else:
            self.samples = (*self.samples, Sample.join(a, b))
        self.rows += len(x)

    def value(self, measure: Measure) -> Tensor:
        statistic = self.total if self.total is not None else self.samples[0].merge(*self.samples[1:])
        if issubclass(measure.reads, Alignment):
            return measure(statistic.alignment(measure.reads)).squeeze()
        return measure(view_of(measure.reads, statistic, 0, 0))


@dataclass
class ByAtoms:
    """The atoms of each layer, on the CPU: no input, no forward."""

    measure: Measure
    pairs: Sequence[tuple[Tensor, Tensor]]  # (m, height × width) of each layer
    statistic: str = "atoms"
    sites: int = field(init=False)

    def __post_init__(self) -> None:
        self.sites = len(self.pairs)

    def __call__(self, part: Part = not_counted) -> Tensor:
        with part(MEASURE), torch.no_grad():
            return torch.cat([self.measure(Atoms(x[None], y[None])).flatten() for x, y in self.pairs])


@dataclass
class ByWeights:
    """Other measures of weights, as `compare_weights` has them: all pairs of layers."""

    measure: Measure
    a: nn.Module
    b: nn.Module
    options: Mapping[str, Any]
    statistic: str = "weights"
    sites: int = 0

    def __call__(self, part: Part = not_counted) -> Tensor:
        with part(MEASURE):
            found = compare_weights(self.a, self.b, measures=[self.measure], **self.options)
        assert isinstance(found, Comparison)
        value = found.matrix(self.measure.name)
        self.sites = value.size
        return torch.as_tensor(value)
