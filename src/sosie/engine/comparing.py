"""`compare`: models, or activations that were saved, on the same inputs, in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..capture import Rule, borrowed, cut
from ..measures import Measure
from ..progress import Progress
from ..results import Comparison, Comparisons
from ..stats import BLOCK
from .collect import Pass
from .distributed import SingleProcess, together
from .network import (
    Network,
    Source,
    for_each,
    is_statistics,
    number_duplicates,
    open_network,
    room_of,
    things_and_data,
)
from .partial import Checkpoint, finish_files
from .plan import MEMORY, Request, draws_of, find_measures, parse_size
from .provenance import digest_of, provenance
from .stream import Stream, chunk_on_cpu

DEFAULT = "debiased_cka"


def compare(
    model_a: Any,
    model_b: Any = None,
    data: Any = None,
    *,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    sites: Any = None,
    sites_a: Any = None,
    sites_b: Any = None,
    rows: Rule = "flatten",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    exact: bool = False,
    block: int = BLOCK,
    seed: int = 0,
    null: str | None = None,
    draws: int = 200,
    interval: bool = False,
    resume: str | os.PathLike[str] | None = None,
) -> Comparison | Comparisons:
    """Compare every site of one model with every site of another, on the same inputs, in one pass.

    `model_a`, `model_b`: modules, model specifications, saved activations ({site: array}, .npz, .safetensors),
    sketches (`sketch.using("features")` chooses their kernel), or files of saved statistics, which are merged.
    `compare([m1, m2, m3], data)` compares all pairs in one pass. `data`: anything that yields tensors, (x, y) pairs,
    dicts of keyword arguments or lists of strings, or a data specification; `sosie.data.DataPart` is one part of a
    larger set.

    `measures`: None takes debiased_cka, of sketches linear_cka. `sites`: of every model, or `sites_a` and `sites_b`
    where they differ: names, globs, types; None takes blocks or layers. `rows`: how activations become rows.
    `prepare_a`, `prepare_b`: each model's own normalisation, or tokeniser of text. `inputs`: batch → model arguments.

    `exact=True` keeps whole Gram matrices or covariances instead of blocks of `block` rows; `memory` is the budget for
    that ("4GiB"). `precision`: "tf32" (the default for Gram matrices on a GPU), "float32", "float64". `resume`: a file
    that the statistics are saved to on the way, and read from if it is there.

    `null="permutation"`: p-values from `draws` shuffles of which row belongs to which (seeded by `seed`), within
    blocks or of sampled rows, without another pass; also corrected for the search over all pairs of sites. What
    chance gives on average comes along free where there is a formula. `interval=True`: a 95 % interval for every
    measure, also where that means computing it on a hundred parts of the rows.

    In an initialised torch.distributed every process has to make the same call; each reads its share of the data, and
    all get the result. `with sosie.engine.single_process():` compares in this process alone.
    """
    with together() as ranks:
        things, data = things_and_data(model_a, model_b, data)
        if all(map(is_statistics, things)):
            return finish_files(things, provenance(), measures=measures, null=null, interval=interval)
        room = next((room for thing in things if (room := room_of(thing)) is not None), None)
        if room is not None:
            decided = {  # when sketches were made; None where nothing is asked for
                "data": data,
                "sites": sites,
                "sites_a": sites_a,
                "sites_b": sites_b,
                "rows": None if rows == "flatten" else rows,
                "prepare_a": prepare_a,
                "prepare_b": prepare_b,
                "inputs": inputs,
                "precision": precision,
                "memory": memory,
                "max_rows": max_rows,
                "exact": exact or None,
                "interval": interval or None,
                "resume": resume,
            }
            return room.compare_sketches(things, measures, draws=draws_of(null, draws), seed=seed, decided=decided)
        request = Request(
            find_measures(DEFAULT if measures is None else measures, of="layers"),
            rows=rows,
            device=device,
            precision=precision,
            memory=parse_size(memory) or MEMORY,
            max_rows=max_rows,
            exact=exact,
            block=block,
            seed=seed,
            draws=draws_of(null, draws),
            interval=interval,
        )
        each_sites = for_each("sites", len(things), sites_a, sites_b, sites)
        each_prepare = for_each("prepare", len(things), prepare_a, prepare_b)
        sources = [
            open_network(thing, sites=own, rows=rows, prepare=prepare, inputs=inputs, device=device)
            for thing, own, prepare in zip(things, each_sites, each_prepare, strict=True)
        ]
        number_duplicates(sources)
        return _compare(sources, data, request, resume, ranks)


def _compare(
    sources: list[Source],
    data: Any,
    request: Request,
    resume: str | os.PathLike[str] | None,
    ranks: SingleProcess,
) -> Comparison | Comparisons:
    """Read the data once, in this process or its share of it; the first process makes the result for all."""
    if resume is not None and len(sources) != 2:
        raise ValueError("resume= is for one pair of models; compare the pairs one by one")
    identities = [source.identity() for source in sources]
    twins = [identities.index(identity) for identity in identities]
    with ExitStack() as stack:
        stack.enter_context(borrowed([source.model for source in sources if isinstance(source, Network)]))
        for k in dict.fromkeys(twins):
            stack.enter_context(sources[k].opened())
        stream = Stream.of(data, sources, request.max_rows)
        run = Pass(sources, twins, stream, request, any_rows=resume is not None)
        ranks.agree(
            lambda: {
                **_made_with(sources, stream, request),
                "the first batch": "" if stream.first is None else digest_of(stream.first),
                "the number of inputs": str(stream.total),
                "what the sites are": repr(run.sides),
                "what is collected": repr(run.plan),
            }
        )
        pair = run.partials[0, 1]
        if resume is not None:
            pair.made_with, pair.first_rows = _made_with(sources, stream, request), run.sampled_rows(stream.first)
        checkpoint = Checkpoint(resume, pair, sources)
        chunks = stream.chunks(
            block=request.block if "grams" in run.plan.statistics else None,
            skip=ranks.once(checkpoint.restore),
            largest=chunk_on_cpu(sources, run.sides),
            share=ranks.share,
            skipped=checkpoint.check_skipped if ranks.first else None,
        )
        task = f"comparing {' and '.join(dict.fromkeys(source.name for source in sources))}"
        expected = None if stream.expected is None else -(-stream.expected // ranks.share.of)
        with Progress(task, expected, "inputs", shown=ranks.first) as bar:
            bar.advance(pair.inputs)
            for chunk in ranks.deal(chunks, run):
                run.read(chunk)
                bar.advance(chunk.count)
                checkpoint.digest(chunk)
                if checkpoint.due() and not ranks.several:  # each of several processes has only a part
                    run.settle()
                    checkpoint.save()
        run.settle()
        run.gather(ranks)
        ranks.collect(checkpoint.digests.sums, checkpoint.digests.absorb)

    def result() -> Comparison | Comparisons:
        checkpoint.save()
        models = [source.describe() for source in sources]
        about = provenance(settings=request.as_text(), models=models, data=data, processes=ranks.several)
        values = run.finish(about)
        return values[0, 1] if len(sources) == 2 else Comparisons(tuple(source.name for source in sources), values)

    return ranks.once(result)


def _made_with(sources: Sequence[Source], stream: Stream, request: Request) -> dict[str, str]:
    """What saved statistics, and processes that share the work, must have in common."""
    return {
        "models": " ".join(source.digest() for source in sources),
        "data": "" if stream.first is None else digest_of(cut(stream.first, 0, 1)),
        "settings": f"block {request.block}, seed {request.seed}, precision {request.precision or 'default'}",
    }
