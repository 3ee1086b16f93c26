"""The door to cost accounting: models and measures in, a table of costs out."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import Chunk, Rule, cut, recut
from ...capture.examples import example_input
from ...data import open_data
from ...measures import Measure, find
from ...models import open_model, weights_of, with_name
from ...models.atoms import atom_layers, recompose
from ...process_state import kept_random_state
from ...progress import Progress
from ...results import Cost, Costs
from ...stats import Atoms
from ..plan import MEMORY, parse_size
from ..provenance import describe_model, provenance
from .counting import counted
from .running import FORWARD, MEASURE, ByAtoms, ByProbes, ByWeights, Run, Watched

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
