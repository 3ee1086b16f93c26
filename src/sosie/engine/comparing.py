"""`compare`: models, or activations that were saved, on the same inputs, in one pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..capture import Chunk, Rule, borrowed, cut
from ..measures import Measure
from ..results import Comparison, Comparisons
from ..stats import BLOCK
from .collect import Pass, gather
from .distributed import SingleProcess, together
from .network import (
    TRIED,
    Network,
    Source,
    for_each,
    is_statistics,
    number_duplicates,
    open_network,
    room_of,
    things_and_data,
)
from .partial import Checkpoint, Partial, finish_files
from .plan import MEMORY, Request, draws_of, find_measures, make_plan, parse_size
from .provenance import digest_of, provenance
from .stream import Stream, chunk_on_cpu, rows_per_input, saved_chunk

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
    first_row: int = 0,
    null: str | None = None,
    draws: int = 200,
    interval: bool = False,
    kernel: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    spread: bool = True,
) -> Comparison | Comparisons:
    """Compare every site of one model with every site of another, on the same inputs, in one pass.

    `model_a`, `model_b`: modules, model specifications, saved activations ({site: array}, .npz, .safetensors),
    sketches, or files of saved statistics, which are merged. `compare([m1, m2, m3], data)` compares all pairs in one
    pass. `data`: anything that yields tensors, (x, y) pairs, dicts of keyword arguments or lists of strings, or a data
    specification.

    `measures`: None takes debiased_cka, of sketches linear_cka. `sites`: of every model, or `sites_a` and `sites_b`
    where they differ: names, globs, types; None takes blocks or layers. `rows`: how activations become rows.
    `prepare_a`, `prepare_b`: each model's own normalisation, or tokeniser of text. `inputs`: batch → model arguments.

    `exact=True` keeps whole Gram matrices or covariances instead of blocks of `block` rows; `memory` is the budget for
    that ("4GiB"). `precision`: "tf32" (the default for Gram matrices on a GPU), "float32", "float64". `resume`: a file
    that the statistics are saved to on the way, and read from if it is there. `first_row`: the index of the first input
    where the data are one part of a larger set.

    `null="permutation"`: p-values from `draws` shuffles of which row belongs to which (seeded by `seed`), within
    blocks or of sampled rows, without another pass; also corrected for the search over all pairs of sites. What
    chance gives on average comes along free where there is a formula. `interval=True`: a 95 % interval for every
    measure, also where that means computing it on a hundred parts of the rows.

    `kernel`: of sketches (see `sosie.sketch`): "hadamard" (features × gradients, the default), "features" …

    In an initialised torch.distributed every process has to make the same call; each reads its share of the data, and
    all get the result. `spread=False` compares in this process alone.
    """
    with together(spread) as ranks:
        things, data = things_and_data(model_a, model_b, data)
        if all(map(is_statistics, things)):
            return finish_files(things, provenance(), measures=measures, null=null, interval=interval)
        room = next((room for thing in things if (room := room_of(thing)) is not None), None)
        chosen = find_measures(measures if measures is not None else (room.DEFAULT if room else DEFAULT), of="layers")
        request = Request(
            chosen,
            rows=rows,
            device=device,
            precision=precision,
            memory=parse_size(memory) or MEMORY,
            max_rows=max_rows,
            exact=exact,
            block=block,
            seed=seed,
            first_row=first_row,
            draws=draws_of(null, draws),
            interval=interval,
        )
        if room is not None:
            room.check_sketches(things, data=data, sites=sites, sites_a=sites_a, sites_b=sites_b, prepare_a=prepare_a,
                                prepare_b=prepare_b, inputs=inputs, precision=precision, memory=memory,
                                max_rows=max_rows, resume=resume, exact=exact or None, interval=interval or None,
                                first_row=first_row or None, rows=None if rows == "flatten" else rows)  # fmt: skip
            return room.compare_sketches(things, chosen, kernel=kernel or room.KERNEL, draws=request.draws, seed=seed)
        if kernel is not None:
            raise ValueError(f"kernel={kernel!r} applies to sketches only: make them with sosie.sketch(model, data)")
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
    # A model that is compared with itself runs once: twins[k] is the first source that would give the same rows.
    identities = [source.identity() for source in sources]
    twins = [identities.index(identity) for identity in identities]
    pairs = list(itertools.combinations(range(len(sources)), 2))
    if resume is not None and len(pairs) != 1:
        raise ValueError("resume= is for one pair of models; compare the pairs one by one")
    with ExitStack() as stack:
        stack.enter_context(borrowed([source.model for source in sources if isinstance(source, Network)]))
        for k in dict.fromkeys(twins):
            stack.enter_context(sources[k].opened())

        # What there is, learnt from the first few inputs
        stream = Stream.of(data, sources, request.max_rows)
        saved_chunk(sources, request.memory, TRIED)
        looks = {k: sources[k].look(stream.first) for k in dict.fromkeys(twins)}
        sides = [replace(looks[twin], name=source.name) for twin, source in zip(twins, sources, strict=True)]
        mixing = {k: note for k in looks if (note := sources[k].mixing(stream.first)) is not None}
        per_input = rows_per_input([sources[k] for k in looks])
        if per_input != 1 and any("inputs" in measure.needs for measure in request.measures):
            raise ValueError("measures that regress the inputs out need one row per input, not rows='positions'")

        # How the request will be met. A part of the data must get the plan that every other part gets, however many
        # rows it has; with several models the widest pair decides, so that all pairs rest on the same statistics.
        rows = None if stream.expected is None or resume is not None else stream.expected * per_input
        widest = sorted((side.widths for side in sides), key=sum)[-2:]
        plan = make_plan(
            request, (widest[0], widest[1]), rows, budget=request.memory // len(pairs), blocks=per_input == 1
        )
        made_with = {}
        if resume is not None or ranks.several:
            made_with = {
                "models": " ".join(source.digest() for source in sources),
                "data": "" if stream.first is None else digest_of(cut(stream.first, 0, 1)),
                "settings": f"block {request.block}, seed {request.seed}, precision {request.precision or 'default'}",
            }
        ranks.agree(
            lambda: {
                **made_with,
                "the first batch": "" if stream.first is None else digest_of(stream.first),
                "the number of inputs": str(stream.total),
                "what the sites are": repr(sides),
                "what is collected": repr(plan),
            }
        )
        samples = {} if resume is None else {k: sources[k].sampled_rows(stream.first) for k in looks}
        partials = {
            (i, j): Partial(
                side_a=sides[i],
                side_b=sides[j],
                kinds=plan.kinds,
                rows_rule=request.rule,
                rows=request.first_row * per_input,
                notes=plan.notes,
                made_with=made_with,
                draws=request.draws,
                seed=request.seed,
                interval=request.interval,
                mixing=tuple(mixing[k] for k in dict.fromkeys((twins[i], twins[j])) if k in mixing),
                first_rows=[samples[twins[k]] for k in (i, j) if samples],
                max_rows=request.max_rows,
            )
            for i, j in pairs
        }

        # The pass
        run = Pass(sources, twins, sides, plan, request, per_input)
        checkpoint = Checkpoint(resume, partials[pairs[0]], sources)
        skip = ranks.once(checkpoint.restore)
        block = request.block if "grams" in plan.statistics else None
        chunks = stream.chunks(
            block=block,
            skip=skip,
            largest=chunk_on_cpu(sources, sides),
            share=ranks.share,
            skipped=checkpoint.check_skipped if ranks.first else None,
            saved_chunk=saved_chunk(sources, request.memory, block or TRIED),
        )

        def note_mixing() -> None:
            late = {k: note for k in looks if k not in mixing and (note := sources[k].mixing_in_pass()) is not None}
            for (i, j), partial in partials.items():
                partial.mixing += tuple(late[k] for k in dict.fromkeys((twins[i], twins[j])) if k in late)

        def after(chunk: Chunk) -> None:
            checkpoint.digest(chunk)
            if checkpoint.due() and not ranks.several:  # of several processes each knows but a part
                run.look_at_all()
                note_mixing()
                checkpoint.save()

        expected = None if stream.expected is None else -(-stream.expected // ranks.share.of)
        run.run(ranks.deal(chunks, run), partials, expected=expected, each=after, shown=ranks.first)
        note_mixing()
        gather(ranks, run, partials, request.first_row * per_input)
        ranks.collect(checkpoint.digests.sums, checkpoint.digests.absorb)

    def result() -> Comparison | Comparisons:
        checkpoint.save()
        models = [source.describe() for source in sources]
        about = provenance(settings=request.as_text(), models=models, data=data, processes=ranks.several)
        for partial in partials.values():
            partial.strained = run.strained()
        finished = {pair: partial.finish(about) for pair, partial in partials.items()}
        return finished[0, 1] if len(sources) == 2 else Comparisons(tuple(s.name for s in sources), finished)

    return ranks.once(result)
