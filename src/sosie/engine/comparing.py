"""The door to comparing: sources and data in, one pass, a result out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..capture import Rule, borrowed, check_rule, cut
from ..files import DamagedFile
from ..measures import Measure, find
from ..results import Comparison, Comparisons, Side
from ..stats import BLOCK
from .collect import Pair, Pass, Totals, gather
from .distributed import SingleProcess, together
from .network import (
    Network,
    SavedActivations,
    Source,
    arguments_of,
    is_statistics,
    number_duplicates,
    room_of,
    source_of,
)
from .partial import Checkpoint, Partial, merge_files
from .plan import MEMORY, Plan, Settings, UncertaintyOptions, Widths, check_precision, draws_of, make_plan, parse_size
from .provenance import digest_of, provenance
from .stream import Stream, chunk_on_cpu, rows_per_input

DEFAULT = "debiased_cka"


def compare(
    model_a: Any,
    model_b: Any = None,
    data: Any = None,
    *,
    measures: str | Measure | Sequence[str | Measure] | None = None,
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

    `model_a`, `model_b`: modules, model specifications, saved activations ({site: array}, .npz,
    .safetensors), sketches, or files of saved statistics, which are merged. `compare([m1, m2, m3], data)` compares all
    pairs in one pass. `data`: anything that yields tensors, (x, y) pairs, dicts of keyword arguments or lists
    of strings, or a data specification.

    `measures`: None takes debiased_cka, of sketches linear_cka. `sites_a`, `sites_b`: names, globs, types; None takes
    blocks or layers. `rows`: how activations become
    rows. `prepare_a`, `prepare_b`: each model's own normalisation, or tokeniser of text. `inputs`: batch →
    model arguments.
    `exact=True` keeps whole Gram matrices or covariances instead of blocks of `block` rows; `memory` is the
    budget for that ("4GiB"). `precision`: "tf32" (the default for Gram matrices on a GPU), "float32",
    "float64". `resume`: a file that the statistics are saved to on the way, and read from if it is there.
    `first_row`: the index of the first input where the data are one part of a larger set.

    `null="permutation"`: p-values from `draws` shuffles of which row belongs to which (seeded by `seed`), within
    blocks or of sampled rows, without another pass; also corrected for the search over all pairs of sites. What
    chance gives on average comes along free where there is a formula. `interval=True`: a 95 % interval for every
    measure, also where that means computing it on a hundred parts of the rows.

    `kernel`: of sketches (see `sosie.sketch`): "hadamard" (features × gradients, the default), "features" …

    In an initialised torch.distributed every process has to make the same call; each reads its share of the data, and
    all get the result. `spread=False` compares in this process alone.
    """
    with together(spread) as ranks:
        things, data = arguments_of(model_a, model_b, data)
        if all(is_statistics(thing) for thing in things):
            if measures is not None or null is not None or interval:
                raise ValueError(
                    "saved statistics are merged as they were collected: measures, null and interval are chosen then"
                )
            try:
                return merge_files(things).finish(provenance())
            except (RuntimeError, IndexError) as error:
                raise DamagedFile(f"these statistics do not fit together: {error}") from error
        check_rule(rows)
        check_precision(precision)
        room = next((found for thing in things if (found := room_of(thing)) is not None), None)
        if measures is None:
            measures = DEFAULT if room is None else room.DEFAULT
        chosen = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
        if not chosen:
            raise ValueError("no measures asked for; `sosie measures` lists them")
        if answers := [measure.name for measure in chosen if measure.reads_outputs]:
            raise ValueError(f"{', '.join(answers)}: what models answer, not their layers; use compare_outputs")
        if made_of := [measure.name for measure in chosen if measure.reads_weights]:
            raise ValueError(f"{', '.join(made_of)}: of weights, without data; use compare_weights")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        doubt = UncertaintyOptions(draws_of(null, draws), seed, interval)
        if room is not None:
            room.check_sketches(things, data=data, sites_a=sites_a, sites_b=sites_b, prepare_a=prepare_a,
                           prepare_b=prepare_b, inputs=inputs, precision=precision, memory=memory, max_rows=max_rows,
                           resume=resume, exact=exact or None, interval=interval or None, first_row=first_row or None,
                           rows=None if rows == "flatten" else rows)  # fmt: skip
            return room.compare_sketches(things, chosen, kernel=kernel or room.KERNEL, draws=doubt.draws, seed=seed)
        if kernel is not None:
            raise ValueError(f"kernel={kernel!r} is of sketches: make them with sosie.sketch(model, data)")
        settings = Settings(
            chosen, rows, device, precision, parse_size(memory), max_rows, exact, block, seed, first_row, doubt
        )
        if len(things) > 2 and (sites_b is not None or prepare_b is not None):
            raise ValueError(
                "with more than two models, sites_a and prepare_a are for all of them; leave sites_b and prepare_b out"
            )
        sites = [sites_a] * len(things) if len(things) > 2 else [sites_a, sites_b]
        prepares = [prepare_a] * len(things) if len(things) > 2 else [prepare_a, prepare_b]
        sources = [
            source_of(thing, site, prepare, settings, inputs)
            for thing, site, prepare in zip(things, sites, prepares, strict=True)
        ]
        number_duplicates(sources)
        return _compare(sources, data, settings, resume, ranks)


def _compare(
    sources: list[Network | SavedActivations],
    data: Any,
    settings: Settings,
    resume: str | os.PathLike[str] | None,
    ranks: SingleProcess,
) -> Comparison | Comparisons:
    twins = [_first_like(sources, k) for k in range(len(sources))]
    pairs = list(itertools.combinations(range(len(sources)), 2))
    checkpoint = Checkpoint(resume, pairs, sources, on_the_way=not ranks.several)
    with ExitStack() as stack:
        stack.enter_context(borrowed([source.model for source in sources if isinstance(source, Network)]))
        for k in dict.fromkeys(twins):
            stack.enter_context(sources[k].opened())
        stream = Stream.of(data, sources)
        looks = {k: sources[k].look(stream.first) for k in dict.fromkeys(twins)}
        sides = [replace(looks[twin], name=source.name) for twin, source in zip(twins, sources, strict=True)]
        mixing = {k: sources[k].mixing(stream.first) for k in looks}
        known = None if stream.total is None else min(stream.total, settings.max_rows or stream.total)
        each = rows_per_input([sources[k] for k in looks])
        inputs = any("inputs" in measure.needs for measure in settings.measures)
        if inputs and each != 1:
            raise ValueError("measures that regress the inputs out need one row an input, not rows='positions'")
        # A part of the data must get the plan that every other part gets, however many rows it has.
        rows = None if known is None or resume is not None else known * each
        plan = _plan(sides, rows, settings, pairs=len(pairs), blocks=each == 1)
        run = Pass(
            *(sources, twins, sides, plan),
            seed=settings.seed,
            precision=settings.precision,
            draws=settings.doubt.draws,
            inputs=inputs,
            per_input=each,
        )
        made_with = _made_with(sources, stream, settings) if resume is not None or ranks.several else {}
        ranks.agree(lambda: {**made_with, **_about_parts(stream, sides, plan)})
        totals = {pair: Totals(rows=settings.first_row * each) for pair in pairs}

        def told(*pair: int) -> tuple[str, ...]:
            notes = (mixing[k] for k in dict.fromkeys(twins[i] for i in pair))
            return tuple(note for note in notes if note is not None)

        def partials() -> dict[Pair, Partial]:
            run.look_at_all()
            return {
                (i, j): _partial(totals[i, j], (sides[i], sides[j]), run, settings, made_with, told(i, j))
                for i, j in pairs
            }

        skip = ranks.once(lambda: checkpoint.restore(totals, partials, most=settings.max_rows))
        chunks = stream.chunks(
            block=settings.block if "grams" in plan.statistics else None,
            skip=skip,
            max_rows=settings.max_rows,
            largest=chunk_on_cpu(sources, sides),
            share=ranks.share,
            skipped=checkpoint.skipped if ranks.first else None,
        )
        run.run(
            checkpoint.digested(ranks.deal(chunks, run)),
            totals,
            expected=known if known is None else -(-known // ranks.share.of),
            each=lambda: checkpoint.save(partials),
            shown=ranks.first,
        )
        gather(ranks, run, totals, settings.first_row * each)
        ranks.collect(checkpoint.digests.sums, checkpoint.digests.absorb)

    def result() -> Comparison | Comparisons:
        found = partials()
        checkpoint.save(lambda: found, now=True)
        models = [source.describe() for source in sources]
        about = provenance(settings=settings.as_text(), models=models, data=data, processes=ranks.several)
        return _finished(found, sources, about)

    return ranks.once(result)


def _finished(found: dict[Pair, Partial], sources: Sequence[Source], about: dict[str, Any]) -> Comparison | Comparisons:
    finished = {pair: partial.finish(about) for pair, partial in found.items()}
    if len(sources) == 2:
        return finished[0, 1]
    return Comparisons(tuple(source.name for source in sources), finished)


def _first_like(sources: Sequence[Source], k: int) -> int:
    """The first source that would give the same rows as source k: a model compared with itself runs once."""
    return next(i for i in range(k + 1) if sources[i].identity() == sources[k].identity())


def _plan(sides: Sequence[Side], rows: int | None, settings: Settings, *, pairs: int, blocks: bool) -> Plan:
    # With several models the widest pair decides, so that all pairs rest on the same statistics.
    widest = sorted((side.widths for side in sides), key=sum)[-2:]
    return make_plan(
        settings.measures,
        Widths(widest[0], widest[-1], rows),
        memory=(MEMORY if settings.memory is None else settings.memory) // pairs,
        exact=settings.exact,
        block=settings.block,
        precision=settings.precision,
        blocks=blocks,
    )


def _partial(
    total: Totals,
    sides: tuple[Side, Side],
    run: Pass,
    settings: Settings,
    made_with: dict[str, str],
    mixing: tuple[str, ...],
) -> Partial:
    total.settle()
    short = settings.max_rows is not None and total.inputs < settings.max_rows
    return Partial(
        *sides,
        kinds=run.plan.kinds,
        rows_rule=settings.rows if isinstance(settings.rows, str) else getattr(settings.rows, "__name__", "function"),
        statistics=dict(total.statistics),
        inputs=total.inputs,
        rows=total.rows,
        notes=run.plan.notes,
        shortage=f"max_rows={settings.max_rows}, but the data had {total.inputs} inputs" if short else None,
        strained=run.strained(),
        made_with=made_with,
        doubt=settings.doubt,
        mixing=mixing,
    )


def _about_parts(stream: Stream, sides: Sequence[Side], plan: Plan) -> dict[str, str]:
    """What processes that share the work have to have in common, besides what saved statistics have."""
    return {
        "the first batch": "" if stream.first is None else digest_of(stream.first),
        "the number of inputs": str(stream.total),
        "what the sites are": repr(sides),
        "what is collected": repr(plan),
    }


def _made_with(sources: Sequence[Source], stream: Stream, settings: Settings) -> dict[str, str]:
    """What saved statistics must have in common with those they are continued by or merged with."""
    return {
        "models": " ".join(source.digest() for source in sources),
        "data": "" if stream.first is None else digest_of(cut(stream.first, 0, 1)),
        "settings": f"block {settings.block}, seed {settings.seed}, precision {settings.precision or 'default'}",
    }
