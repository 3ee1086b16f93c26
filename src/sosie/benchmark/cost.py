"""The door to cost accounting: models and measures in, a table of costs out."""

from __future__ import annotations

import copy
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..capture import Chunk, Rule, as_found, borrowed, cut, model_arguments, recut, to_rows, watch
from ..capture.arguments import example_input
from ..data import open_data
from ..engine.pairs import check_widths, view_of
from ..engine.plan import MEMORY, Request, make_plan, parse_size
from ..engine.provenance import describe_model, provenance
from ..linalg import all_by_torch
from ..measures import Measure, find
from ..models import atom_layers, open_model, recompose, weights_of, with_name
from ..process_state import kept_random_state, products
from ..progress import Progress
from ..results import Comparison, Cost, Costs
from ..stats import Alignment, Atoms, MomentMaker, Moments, RowSampler, Sample, SampleMaker
from ..weights import compare_weights

# Operations and memory, counted as torch runs them

Shape = Sequence[int]

aten = torch.ops.aten

# Functions that ask for no vectors; while operations are watched torch computes them all the same.
_WITHOUT_VECTORS = (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.matrix_norm, torch.linalg.matrix_rank)
_VALUES_ONLY: ContextVar[bool] = ContextVar("sosie_values_only", default=False)


def _sides(matrix: Shape) -> tuple[int, int, int]:
    """How many matrices, and the longer and shorter side of each."""
    *many, rows, columns = matrix
    return math.prod(many), max(rows, columns), min(rows, columns)


def _svd(a: Shape, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> int:
    count, m, n = _sides(a)
    with_vectors = compute_uv and not _VALUES_ONLY.get()
    return count * (6 * m * n**2 + 20 * n**3 if with_vectors else 2 * m * n**2 + 2 * n**3)


def _eigh(a: Shape, triangle: str = "L", compute_v: bool = True, **_: Any) -> int:
    count, n, _short = _sides(a)
    return count * (9 * n**3 if compute_v and not _VALUES_ONLY.get() else 4 * n**3 // 3)


def _qr(a: Shape, mode: str = "reduced", **_: Any) -> int:
    count, m, n = _sides(a)
    triangle = 2 * m * n**2 - 2 * n**3 // 3
    return count * (triangle if mode == "r" else 2 * triangle)


def _cube(share: float) -> Callable[..., int]:
    """share × n³ of square matrices."""

    def formula(a: Shape, *_: Any, **__: Any) -> int:
        count, n, _short = _sides(a)
        return int(count * share * n**3)

    return formula


def _solve(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    count, n, _short = _sides(a)
    return int(count * 2 * n**3 / 3) + 2 * n * math.prod(b)


def _triangular(a: Shape, b: Shape, **_: Any) -> int:
    return a[-1] * math.prod(b)


def _twice_triangular(b: Shape, a: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[-1] * math.prod(b)


def _squares(a: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _vectors(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _added_vectors(c: Shape, a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _distances(x: Shape, y: Shape, *_: Any, **__: Any) -> int:
    return 3 * math.prod(x) * y[-2]


# What torch's counter does not know, a multiplication and an addition being two. Factorisations by the leading terms of
# Golub and Van Loan, Matrix Computations (4th edition): singular values 2mn² + 2n³, with vectors 6mn² + 20n³ (8.6.3);
# eigenvalues of symmetric matrices 4n³/3, with vectors 9n³ (8.3); Householder's R 2mn² − 2n³/3, as much again for Q
# (5.2); Cholesky n³/3 (4.2); elimination 2n³/3, an inverse 2n³ (3.2); each triangle of a solution n² a column (3.1).
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._linalg_svd: _svd,
    aten._linalg_eigh: _eigh,
    aten.linalg_qr: _qr,
    aten.linalg_cholesky_ex: _cube(1 / 3),
    aten.linalg_inv_ex: _cube(2),
    aten.linalg_lu_factor_ex: _cube(2 / 3),
    aten._linalg_det: _cube(2 / 3),
    aten._linalg_slogdet: _cube(2 / 3),
    aten._linalg_solve_ex: _solve,
    aten.linalg_solve_triangular: _triangular,
    aten.cholesky_solve: _twice_triangular,
    aten.linalg_vector_norm: _squares,
    aten.mv: _vectors,
    aten.dot: _vectors,
    aten.vdot: _vectors,
    aten.addmv: _added_vectors,
    aten._cdist_forward: _distances,
}


@dataclass
class Count:
    """What a run took: operations by part, the most bytes of tensors alive at a time, and what had no formula."""

    flops: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    unknown: set[str] = field(default_factory=set)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this part."""
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        with counter:
            yield
        self.flops[name] = self.flops.get(name, 0) + counter.get_total_flops()


@contextmanager
def counted() -> Iterator[Count]:
    """Count what runs inside, `count.part("…")` by part; everything is done by torch, so that it is seen.

    Elementwise operations, sums and comparisons are not counted, as in torch's own counter.
    """
    count = Count()
    alive = _Alive(count)
    with all_by_torch(), _Asked(), alive:
        yield count


class _Asked(TorchFunctionMode):
    """Notices what was asked for, before torch takes it apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WITHOUT_VECTORS:
            return func(*args, **(kwargs or {}))
        token = _VALUES_ONLY.set(True)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _VALUES_ONLY.reset(token)


class _Alive(TorchDispatchMode):
    """Follows the memory of tensors made inside the block until it is given back."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count
        self._known: set[int] = set()
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            self._meet(tensor, tensor.untyped_storage().nbytes())
        self._count.peak_bytes = max(self._count.peak_bytes, self._bytes)
        packet = getattr(func, "_overloadpacket", func)
        known = packet in FORMULAS or packet in flop_registry or packet is aten._linalg_check_errors
        if "linalg" in str(packet) and not known:
            self._count.unknown.add(str(packet).removeprefix("aten."))
        return found

    def _meet(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._bytes += size
            weakref.finalize(storage, self._lose, key, size)

    def _lose(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


# One run of a measure on a pair of models, in parts that can be counted

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
        widths = (x.shape[1],), (y.shape[1],)
        plan = make_plan(Request((self.measure,)), widths, rows, budget=self.memory, blocks=False)
        kind = plan.kinds[self.measure.name]
        if kind == "moments":
            return _Pair(kind, MomentMaker(plan.products), MomentMaker(plan.products))
        lottery = RowSampler(plan.sample_rows)
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


DEFAULT = ("atom_cosine", "cca_r2", "linear_cka", "wcka")  # the first where both models have atoms
LEAST_SECONDS = 0.2  # that a measure is timed for, run again and again
MOST_RUNS = 100


def cost(
    model_a: Any,
    model_b: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    data: Any = None,
    *,
    input_shape: Sequence[int] | None = None,
    probes: Sequence[int] = (100, 1_000, 10_000),
    sites: Any = None,
    rows: Rule = "positions",
    batch: int = 128,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    seed: int = 0,
) -> Costs:
    """Operations, seconds and bytes of measures for one pair of models, for each number of inputs.

    Without `model_b` the model meets itself, run twice. `measures`: None takes cca_r2, linear_cka and wcka, and
    atom_cosine where both models have layers of atoms. Measures of activations compare each site with the same site of
    the other model; `sites`: None takes the layers of atoms where both models have such, else layers or blocks as
    `compare` does. `data`: anything that `compare` takes; None makes random inputs of `input_shape`, or of a shape that
    the first layer takes. Measures of weights need no input and have one row. `memory`: the budget for statistics.

    Operations: `counting.FORMULAS` and torch's own. Seconds: the median of runs, at least one and up to 0.2 s of them,
    after the run that counts. Bytes, beyond models and inputs: on a GPU the most that torch's allocator gave out; else
    the most bytes of tensors that were alive at a time.
    """
    a, b = _opened(model_a, seed), _opened(model_a if model_b is None else model_b, seed)
    if measures is None:
        measures = DEFAULT if _common_layers(a[0], b[0]) else DEFAULT[1:]
    chosen = [find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures)]
    _check(chosen, probes)
    if a[0] is b[0]:
        b = copy.deepcopy(b[0]), *b[1:]  # hooks of one model would fire for both
    place = None if device is None else torch.device(device)
    streamed = [measure for measure in chosen if not measure.reads_weights]
    chunks = _inputs(a[0], data, max(probes), batch, input_shape, seed, place) if streamed else []
    at = sites if sites is not None else _common_layers(a[0], b[0]) or None
    watched = tuple(
        Watched(model, at, rows, None if data is None else prepare, place) for model, _, prepare, _ in (a, b)
    )
    budget = parse_size(memory) or MEMORY
    found: list[Cost] = []
    with Progress("costs", len(streamed) * len(probes) + len(chosen) - len(streamed), "rows") as bar:
        for measure in chosen:
            for count in [None] if measure.reads_weights else probes:
                run: Run
                if count is not None:
                    run = ByProbes(measure, watched[0], watched[1], _first(chunks, count), budget)
                elif issubclass(measure.reads, Atoms):
                    run = ByAtoms(measure, _atoms(a[0], b[0]))
                else:
                    options = {"input_shape": input_shape, "device": place}
                    run = ByWeights(measure, _plain(a[0]), _plain(b[0]), options)
                found.append(_measured(measure, count, run, place))
                bar.advance()
    settings = {"sites": at if at is None or isinstance(at, str) else [str(site) for site in at]}
    about = provenance(
        settings={**settings, "batch": batch, "seed": seed},
        models=list(dict.fromkeys(describe_model(model, name, weights) for model, name, _, weights in (a, b))),
        data="random inputs" if data is None else data,
    )
    kind = "allocated on the GPU" if _on_gpu(place) else "bytes of tensors"
    rule = rows if isinstance(rows, str) else getattr(rows, "__name__", "function")
    return Costs((a[1], b[1]), tuple(found), "cpu" if place is None else str(place), kind, rule, about)


def _measured(measure: Measure, count: int | None, run: Run, device: torch.device | None) -> Cost:
    try:
        with counted() as seen:
            run(seen.part)
    except Exception as error:
        error.add_note(f"while counting {measure.name}" + ("" if count is None else f" on {count} inputs"))
        raise
    seconds: list[float] = []
    peak = seen.peak_bytes
    while not seconds or (sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_RUNS):
        if _on_gpu(device):
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run()
        if _on_gpu(device):
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        seconds.append(time.perf_counter() - start)
    return Cost(
        measure=measure.name,
        probes=count,
        sites=run.sites,
        forward_flops=seen.flops.get(FORWARD, 0),
        measure_flops=seen.flops.get(MEASURE, 0),
        seconds=statistics.median(seconds),
        peak_bytes=peak,
        statistic=run.statistic,
        unknown=tuple(sorted(seen.unknown)),
    )


def _check(measures: Sequence[Measure], probes: Sequence[int]) -> None:
    if not measures:
        raise ValueError("no measures asked for; `sosie measures` lists them")
    for measure in measures:
        if measure.reads_outputs:
            raise ValueError(f"{measure.name} reads answers: it costs the forward passes, which every row tells apart")
        if measure.needs:
            raise ValueError(f"{measure.name} also reads {', '.join(measure.needs)}, which is not accounted for")
    if not probes or any(isinstance(n, bool) or not isinstance(n, int) or n < 4 for n in probes):
        raise ValueError(f"probes: whole numbers of inputs, at least 4 each; got {list(probes)}")


def _opened(thing: Any, seed: int) -> tuple[nn.Module, str, Any, str]:
    """The model, its name, how its inputs are prepared, and what is known of its weights."""
    thing = open_model(thing, seed=seed) if isinstance(thing, str) else thing
    model, name, prepare = with_name(thing)
    if not isinstance(model, nn.Module):
        raise TypeError(f"need a torch.nn.Module or a specification like 'alexnet(atoms=9)', got {name}")
    return model, name, prepare, weights_of(thing)


def _inputs(
    model: nn.Module,
    data: Any,
    count: int,
    batch: int,
    shape: Sequence[int] | None,
    seed: int,
    device: torch.device | None,
) -> list[Chunk]:
    """All inputs, made or read before anything is timed."""
    if data is None:
        few = example_input(_plain(model), shape, seed=seed)
        data = [_like(few, size, seed + k, device) for k, size in enumerate(_sizes(count, batch))]
    elif isinstance(data, str):
        data = open_data(data, batch=batch)
    chunks = list(recut(data, block=1, max_rows=count, largest=batch))
    if (there := sum(chunk.count for chunk in chunks)) < count:
        raise ValueError(f"the data have {there} inputs, but {count} were asked for: fewer probes, or more data")
    return chunks


def _sizes(count: int, batch: int) -> list[int]:
    return [min(batch, count - start) for start in range(0, count, batch)]


def _like(few: Tensor, count: int, seed: int, device: torch.device | None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not few.is_floating_point():
        return few[:1].expand(count, *few.shape[1:]).contiguous()
    return torch.randn(count, *few.shape[1:], generator=generator).to(device or few.device, few.dtype)


def _first(chunks: Sequence[Chunk], count: int) -> list[Chunk]:
    """Those that hold the first so many inputs."""
    found = []
    for chunk in chunks:
        size = min(chunk.count, count - chunk.start)
        if size > 0:
            whole = size == chunk.count
            found.append(chunk if whole else Chunk(cut(chunk.batch, 0, size), chunk.start, size))
    return found


def _plain(model: nn.Module) -> nn.Module:
    """A copy with whole kernels in place of atoms."""
    with kept_random_state():  # a new layer draws numbers before it is given its own
        return recompose(model)


def _common_layers(a: nn.Module, b: nn.Module) -> list[str]:
    """Layers of atoms, where both models have the same."""
    ours = atom_layers(a)
    return list(ours) if ours.keys() == atom_layers(b).keys() else []


def _atoms(a: nn.Module, b: nn.Module) -> list[tuple[Tensor, Tensor]]:
    layers = _common_layers(a, b)
    if not layers:
        raise ValueError(
            "the models do not have the same layers of atoms: alexnet(atoms=9) has such, decompose(model, m) makes them"
        )
    both = [(atom_layers(a)[name].atoms, atom_layers(b)[name].atoms) for name in layers]
    for name, (x, y) in zip(layers, both, strict=True):
        if x.shape != y.shape:
            raise ValueError(f"{name}: atoms of {tuple(x.shape)} and {tuple(y.shape)} cannot be compared")
    return [(x.detach().cpu().flatten(1), y.detach().cpu().flatten(1)) for x, y in both]


def _on_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
