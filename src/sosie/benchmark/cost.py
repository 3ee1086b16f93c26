"""The cost of measures for a pair of models: operations, seconds and bytes, as the number of inputs grows."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..capture import Chunk, Rule, borrowed, recut, rule_name
from ..capture.batches import example_input
from ..checks import whole_number
from ..data import open_data
from ..engine.evaluate import view_of
from ..engine.network import Network
from ..engine.plan import MEMORY, Request, make_plan, parse_size
from ..engine.provenance import describe_model, provenance
from ..linalg import all_by_torch
from ..measures import Measure, find_all
from ..models import atom_layers, open_model, recompose
from ..process_state import kept_random_state, products
from ..progress import Progress
from ..results import Comparison, Cost, Costs
from ..stats import Alignment, Atoms, Moments, RowSampler, Sample, SplitMoments
from ..weights import compare_weights

DEFAULT = ("atom_cosine", "cca_r2", "linear_cka", "wcka")  # the first only if both models have atoms
LEAST_SECONDS = 0.2  # for which a measure is run again and again
MOST_RUNS = 100
FORWARD, MEASURE = "forward", "measure"  # the parts of a run

Part = Callable[[str], AbstractContextManager[Any]]  # a context for a part of a run
Run = Callable[[Part], tuple[Tensor, str]]  # returns one value per site, and the statistic in words


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
    """Count operations, seconds and bytes of measures for one pair of models, for each number of inputs.

    Without `model_b` the model is compared with itself, and run twice. `measures`: None takes cca_r2, linear_cka and
    wcka, and atom_cosine if both models have layers of atoms. Measures of activations compare each site with the same
    site of the other model; `sites`: None takes the layers of atoms if both models have some, otherwise layers or
    blocks as `compare` does. `data`: anything that `compare` takes; None makes random inputs of `input_shape`, or of a
    shape that fits the first layer. Measures of weights need no input and have one row. `memory`: the budget for
    statistics.

    Operations: by `FORMULAS` and torch's own. Seconds: the median of runs, at least one and up to 0.2 s of them, after
    the run that is counted. Bytes, beyond models and inputs: on a GPU the peak of torch's allocator; otherwise the peak
    of the bytes of tensors.
    """
    a, b = (
        Network.of(open_model(model, seed=seed) if isinstance(model, str) else model)
        for model in (model_a, model_a if model_b is None else model_b)
    )
    common = _common_layers(a.model, b.model)
    chosen = find_all((DEFAULT if common else DEFAULT[1:]) if measures is None else measures)
    for measure in chosen:
        if measure.reads_outputs:
            raise ValueError(f"{measure.name} reads answers: it costs the forward passes, which every row lists")
        if measure.needs:
            raise ValueError(f"{measure.name} also reads {', '.join(measure.needs)}, which is not supported")
    for number in probes or [0]:
        whole_number(number, "probes", least=4, why="numbers of inputs")
    if a.model is b.model:
        b.model = copy.deepcopy(b.model)  # hooks of one model would fire for both
    place = None if device is None else torch.device(device)
    for network in (a, b):
        network.sites, network.rows, network.device = sites if sites is not None else common or None, rows, place
        network.prepare = None if data is None else network.prepare
    streamed = [measure for measure in chosen if not measure.reads_weights]
    batches: list[Any] = []  # all inputs are made or read before anything is timed
    if streamed:
        most = max(probes)
        inputs: Any = open_data(data, batch=batch) if isinstance(data, str) else data
        if data is None:
            inputs = [_random_inputs(a.model, input_shape, most, seed, place)]
        chunks = list(recut(inputs, block=1, max_rows=most, largest=batch))
        if (count := sum(chunk.count for chunk in chunks)) < most:
            raise ValueError(f"the data have {count} inputs, but {most} are needed: use fewer probes, or more data")
        batches = [chunk.batch for chunk in chunks]
    costs: list[Cost] = []
    with Progress("costs", len(streamed) * len(probes) + len(chosen) - len(streamed), "rows") as bar:
        for measure in chosen:
            for n in [None] if measure.reads_weights else probes:
                run: Run
                if n is not None:
                    few = list(recut(batches, block=1, max_rows=n, largest=batch))
                    run = functools.partial(from_activations, measure, a, b, few, parse_size(memory) or MEMORY)
                elif issubclass(measure.reads, Atoms):
                    run = functools.partial(from_atoms, measure, _atoms(a.model, b.model))
                else:
                    options = {"input_shape": input_shape, "device": place}
                    run = functools.partial(from_weights, measure, _plain(a.model), _plain(b.model), options)
                costs.append(_measured(measure, n, run, place))
                bar.advance()
    labels = a.sites if a.sites is None or isinstance(a.sites, str) else list(map(str, a.sites))
    about = provenance(
        settings={"sites": labels, "batch": batch, "seed": seed},
        models=list(dict.fromkeys(describe_model(network.model, network.name, network.weights) for network in (a, b))),
        data="random inputs" if data is None else data,
    )
    kind = "allocated on the GPU" if _on_gpu(place) else "bytes of tensors"
    return Costs((a.name, b.name), tuple(costs), "cpu" if place is None else str(place), kind, rule_name(rows), about)


def _measured(measure: Measure, probes: int | None, run: Run, device: torch.device | None) -> Cost:
    try:
        with counted() as count:
            values, statistic = run(count.part)
    except Exception as error:
        error.add_note(f"while counting {measure.name}" + ("" if probes is None else f" on {probes} inputs"))
        raise
    seconds: list[float] = []
    peak = count.peak_bytes
    while not seconds or (sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_RUNS):
        if _on_gpu(device):
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run(nullcontext)
        if _on_gpu(device):
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        seconds.append(time.perf_counter() - start)
    return Cost(
        measure=measure.name,
        probes=probes,
        sites=values.numel(),
        forward_flops=count.flops.get(FORWARD, 0),
        measure_flops=count.flops.get(MEASURE, 0),
        seconds=statistics.median(seconds),
        peak_bytes=peak,
        statistic=statistic,
        unknown=tuple(sorted(count.unknown)),
    )


def _random_inputs(
    model: nn.Module, shape: Sequence[int] | None, count: int, seed: int, device: torch.device | None
) -> Tensor:
    few = example_input(_plain(model), shape, seed=seed)
    size = count, *few.shape[1:]
    if not few.is_floating_point():
        return few[:1].expand(size)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device or few.device, few.dtype)


def _plain(model: nn.Module) -> nn.Module:
    """A copy with whole kernels instead of atoms."""
    with kept_random_state():  # a new layer draws random weights first
        return recompose(model)


def _common_layers(a: nn.Module, b: nn.Module) -> list[str]:
    """The layers of atoms, if both models have the same."""
    layers = atom_layers(a)
    return list(layers) if layers.keys() == atom_layers(b).keys() else []


def _atoms(a: nn.Module, b: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The atoms (m, height × width) of each layer of both models, on the CPU."""
    layers = _common_layers(a, b)
    if not layers:
        raise ValueError("the models need the same layers of atoms: alexnet(atoms=9) has some, decompose makes them")
    pairs = []
    for name in layers:
        x, y = (atom_layers(model)[name].atoms.detach().cpu() for model in (a, b))
        if x.shape != y.shape:
            raise ValueError(f"{name}: atoms of {tuple(x.shape)} and {tuple(y.shape)} cannot be compared")
        pairs.append((x.flatten(1), y.flatten(1)))
    return pairs


def _on_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


# One run of a measure on a pair of models, in parts that are counted


def from_activations(
    measure: Measure, a: Network, b: Network, chunks: Sequence[Chunk], memory: int, part: Part
) -> tuple[Tensor, str]:
    """Run both models on the inputs, and compare each site of one with the same site of the other."""
    pairs: list[_Pair] = []
    with ExitStack() as stack:
        stack.enter_context(borrowed([a.model, b.model]))
        for network in (a, b):
            stack.enter_context(network.opened())
        for chunk in chunks:
            with part(FORWARD):
                rows_a, rows_b = (network.read(chunk, lambda site, rows: rows) for network in (a, b))
            if len(rows_a) != len(rows_b):
                raise ValueError(f"need sites in pairs, got {len(rows_a)} and {len(rows_b)}")
            sites = list(zip(rows_a, rows_b, strict=True))
            count = sum(c.count for c in chunks) / chunk.count
            pairs = pairs or [_Pair(measure, x, y, round(count * len(x)), memory) for x, y in sites]
            with part(MEASURE), products():
                for pair, rows in zip(pairs, sites, strict=True):
                    pair.add(*rows)
        with part(MEASURE), products():
            values = [pair.value() for pair in pairs]
    return torch.stack([value.cpu() for value in values]), "; ".join(dict.fromkeys(pair.kind for pair in pairs))


class _Pair:
    """The growing statistic of one pair of sites: the one that `compare` would choose for this number of rows."""

    def __init__(self, measure: Measure, x: Tensor, y: Tensor, rows: int, memory: int) -> None:
        measure.check_widths(x.shape[1], y.shape[1])
        widths = (x.shape[1],), (y.shape[1],)
        plan = make_plan(Request((measure,)), widths, rows, budget=memory, blocks=False)
        self.measure, self.rows = measure, 0
        self.kind: str = plan.kinds[measure.name]
        self.statistic: Any = {"moments": Moments, "splits": SplitMoments}.get(self.kind, Sample)
        self.parts: list[Any] = []
        if self.kind == "sample":
            self.kind = "all rows" if rows <= plan.sample_rows and plan.widest is None else "sampled rows"
        sampler = RowSampler(plan.sample_rows)
        self.makers = [plan.maker(plan.kinds[measure.name], sampler) for _ in range(2)]

    def add(self, x: Tensor, y: Tensor) -> None:
        both = zip(self.makers, (x, y), strict=True)
        sides = [maker.side([maker.part("", rows, self.rows)], self.rows) for maker, rows in both]
        self.parts.append(self.statistic.join(*sides))
        if self.statistic is not Sample and len(self.parts) > 1:
            self.parts = [self.parts[0].merge(self.parts[1])]  # sums do not grow
        self.rows += len(x)

    def value(self) -> Tensor:
        total = self.parts[0].merge(*self.parts[1:]) if len(self.parts) > 1 else self.parts[0]
        if issubclass(self.measure.reads, Alignment):
            return self.measure(total.alignment(self.measure.reads)).squeeze()
        return self.measure(view_of(self.measure, total, 0, 0))


@torch.no_grad()
def from_atoms(measure: Measure, pairs: Sequence[tuple[Tensor, Tensor]], part: Part) -> tuple[Tensor, str]:
    """Compare the atoms of each layer, without input or forward."""
    with part(MEASURE):
        return torch.cat([measure(Atoms(x[None], y[None])).flatten() for x, y in pairs]), "atoms"


def from_weights(
    measure: Measure, a: nn.Module, b: nn.Module, options: Mapping[str, Any], part: Part
) -> tuple[Tensor, str]:
    """Compare all pairs of layers by `compare_weights`."""
    with part(MEASURE):
        result = compare_weights(a, b, measures=[measure], **options)
    assert isinstance(result, Comparison)
    return torch.as_tensor(result.matrix(measure.name)), "weights"


# Operations and memory, counted as torch runs them

aten = torch.ops.aten
# Functions that need no vectors, though torch computes them while operations are watched.
_WITHOUT_VECTORS = (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.matrix_norm, torch.linalg.matrix_rank)
_VALUES_ONLY: ContextVar[bool] = ContextVar("sosie_values_only", default=False)


def _matrices(flops: Callable[..., float]) -> Callable[..., int]:
    """A formula of the longer and the shorter side of each matrix and the operation's other arguments."""

    def formula(shape: Sequence[int], *args: Any, **options: Any) -> int:
        *many, rows, columns = shape
        options.pop("out_shape", None)
        return math.prod(many) * int(flops(max(rows, columns), min(rows, columns), *args, **options))

    return formula


def _svd(m: int, n: int, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> int:
    return 6 * m * n**2 + 20 * n**3 if compute_uv and not _VALUES_ONLY.get() else 2 * m * n**2 + 2 * n**3


def _eigh(n: int, _: int, triangle: str = "L", compute_v: bool = True, **__: Any) -> float:
    return 9 * n**3 if compute_v and not _VALUES_ONLY.get() else 4 * n**3 / 3


def _qr(m: int, n: int, mode: str = "reduced", **_: Any) -> int:
    triangle = 2 * m * n**2 - 2 * n**3 // 3
    return triangle if mode == "r" else 2 * triangle


def _cube(share: float) -> Callable[..., int]:
    """share × n³ of square matrices."""
    return _matrices(lambda n, *_, **__: share * n**3)


def _twice(which: int) -> Callable[..., int]:
    """A multiplication and an addition for every entry of one of the arguments."""
    return lambda *shapes, **_: 2 * math.prod(shapes[which])


# Operations that torch's counter does not know; a multiplication and an addition are two. Factorisations by the leading
# terms of Golub and Van Loan, Matrix Computations (4th edition): singular values 2mn² + 2n³, with vectors 6mn² + 20n³
# (8.6.3); eigenvalues of symmetric matrices 4n³/3, with vectors 9n³ (8.3); Householder's R 2mn² − 2n³/3, as much again
# for Q (5.2); Cholesky n³/3 (4.2); elimination 2n³/3, an inverse 2n³ (3.2); each triangle of a solution n² per column
# (3.1).
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._linalg_svd: _matrices(_svd),
    aten._linalg_eigh: _matrices(_eigh),
    aten.linalg_qr: _matrices(_qr),
    aten.linalg_cholesky_ex: _cube(1 / 3),
    aten.linalg_inv_ex: _cube(2),
    aten.linalg_lu_factor_ex: _cube(2 / 3),
    aten._linalg_det: _cube(2 / 3),
    aten._linalg_slogdet: _cube(2 / 3),
    aten._linalg_solve_ex: lambda a, b, *_, **__: _cube(2 / 3)(a) + 2 * a[-1] * math.prod(b),
    aten.linalg_solve_triangular: lambda a, b, **_: a[-1] * math.prod(b),
    aten.cholesky_solve: lambda b, a, *_, **__: 2 * a[-1] * math.prod(b),
    aten.linalg_vector_norm: _twice(0),
    aten.mv: _twice(0),
    aten.dot: _twice(0),
    aten.vdot: _twice(0),
    aten.addmv: _twice(1),
    aten._cdist_forward: lambda x, y, *_, **__: 3 * math.prod(x) * y[-2],
}


@contextmanager
def counted() -> Iterator[Count]:
    """Count the work inside, with `count.part("…")` by part; torch does all of it, so that it can be counted.

    Elementwise operations, sums and comparisons are not counted, as in torch's own counter.
    """
    with all_by_torch(), _ValuesOnly(), Count() as count:
        yield count


class _ValuesOnly(TorchFunctionMode):
    """Recognise functions that need no vectors, before torch decomposes them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WITHOUT_VECTORS:
            return func(*args, **(kwargs or {}))
        token = _VALUES_ONLY.set(True)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _VALUES_ONLY.reset(token)


class Count(TorchDispatchMode):
    """The work of a run: operations by part, operations without a formula, and the peak bytes of tensors.

    The memory of a tensor counts from the operation that makes it until it is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}
        self.unknown: set[str] = set()
        self.peak_bytes = self._bytes = 0
        self._known: set[int] = set()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the operations inside as this part."""
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        with counter:
            yield
        self.flops[name] = self.flops.get(name, 0) + counter.get_total_flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        outputs = func(*args, **kwargs)
        for tensor in _tensors(outputs):
            self._meet(tensor, tensor.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        packet = getattr(func, "_overloadpacket", func)
        known = packet in FORMULAS or packet in flop_registry or packet is aten._linalg_check_errors
        if "linalg" in str(packet) and not known:
            self.unknown.add(str(packet).removeprefix("aten."))
        return outputs

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


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
