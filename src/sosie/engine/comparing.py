"""`compare`: models or saved activations on the same inputs, in one pass."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..capture import ONE_ROW, Chunk, Rule, borrowed, check_rule, count_inputs, cut, input_rows
from ..checks import listed
from ..linalg import gram_cuda, lacks_room, largest_number
from ..linalg.products import one_thread
from ..measures import Measure
from ..process_state import products
from ..progress import Progress
from ..results import Comparison, Comparisons, Side, rules_in_words
from ..stats import (
    BLOCK,
    Collected,
    Grams,
    Moments,
    RowSampler,
    Sample,
    SplitMoments,
    grouped_folds,
    on_device,
    read_labels,
)
from .distributed import SingleProcess, together
from .mixing import TRIED
from .network import (
    Network,
    RowSample,
    SavedActivations,
    Source,
    for_each,
    is_statistics,
    made_up_inputs,
    meeting_place,
    models_and_data,
    notes_of_pass,
    number_duplicates,
    open_network,
    package_of,
    pairing_notes,
)
from .order import ROWS, OrderTest
from .partial import MadeUpRows, Partial, ResumeFile, finish_files
from .plan import MEMORY, Plan, Request, StatisticKind, draws_of, find_measures, make_plan, parse_size
from .provenance import add_digests, digest_of, provenance, sent_to_cpu
from .stream import Stream, check_positions, chunk_on_cpu, rows_per_input, saved_chunk

DEFAULT = "debiased_cka"
Pair = tuple[int, int]
FLOAT32_SQUARES = 2.0**115  # Σ x² of a chunk up to which sums of float32 products do not overflow
FLOAT64_SQUARES = 1e80  # and up to which float64 holds products of eight numbers
# Multiply-adds of a product up to which NumPy has one core: its threads keep more for 10 ms after each, and the forward
# pass waits.
FEW_PRODUCTS = 2e9
TOLERATED_OFFSET = 1e3  # n‖mean‖² / Σ‖x − mean‖² up to which float32 products keep their digits


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
    rows_a: Rule | None = None,
    rows_b: Rule | None = None,
    names: Sequence[str | None] | None = None,
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
    groups: Any = None,
    resume: str | os.PathLike[str] | None = None,
) -> Comparison | Comparisons:
    """Compare every site of one model with every site of another, on the same inputs, in one pass.

    `model_a`, `model_b`: modules, model specifications, saved activations ({site: array}, .npz, .safetensors), sketches
    (`sketch.using("features")` chooses their kernel), or files of saved statistics, which are merged. `compare([m1, m2,
    m3], data)` compares all pairs in one pass, and `compare({"base": a, "tuned": b}, data)`, or `names=("base",
    "tuned")`, gives the models names. `data`: an iterable of tensors, (x, y) pairs, dicts of keyword arguments or lists
    of strings, or a data specification; `sosie.data.DataPart` is one part of a larger data set.

    `measures`: debiased_cka by default, linear_cka for sketches. `sites`: names, globs or types, for all models, or
    `sites_a` and `sites_b` for each; by default the blocks or layers. `rows`: the row rule, which turns activations
    into rows, or `rows_a` and `rows_b` for each. `prepare_a`, `prepare_b`: each model's normalisation, or tokeniser of
    text. `inputs`: a function from a batch to the arguments of the models.

    `exact=True` uses whole Gram matrices or covariances instead of blocks of `block` rows, within the `memory` budget
    ("4GiB"). `precision`: "tf32" (the default for Gram matrices on a GPU), "float32" or "float64". `resume`: a file
    where the statistics are saved during the pass; if it exists, the pass continues from it.

    `null="permutation"` adds p-values from `draws` shuffles of the pairing of rows (seeded by `seed`), within blocks
    or of sampled rows, without another pass; also p-values corrected for the search over all pairs of sites. The mean
    and spread of chance need no draws where there is a formula. `interval=True` adds a 95 % interval to every measure,
    even if the measure has to be computed on a hundred parts of the rows.

    `groups` has a label for each input, in the order of the data: predictivity holds the inputs of a group (a clip, a
    subject) out together. Their rows are correlated, so there are no intervals and no chance then.

    With torch.distributed initialised, every process must make the same call; each reads its share of the data, and
    all return the result. `with sosie.engine.single_process():` compares in one process alone.
    """
    with together() as ranks:
        things, all_names, data = models_and_data(model_a, model_b, data, names)
        if all(map(is_statistics, things)):
            if any(all_names):
                raise ValueError("files of statistics name their models already: leave the names out")
            set_already = {"measures": measures, "null": null, "interval": interval, "groups": groups is not None}
            return finish_files(things, provenance(), **set_already)
        if sketching := next(filter(None, map(package_of, things)), None):
            decided = {  # when the sketches were made, so not now; None: not set
                "data": data, "sites": sites, "sites_a": sites_a, "sites_b": sites_b, "rows_a": rows_a,
                "rows_b": rows_b, "rows": None if rows == "flatten" else rows, "prepare_a": prepare_a,
                "prepare_b": prepare_b, "inputs": inputs, "precision": precision, "memory": memory,
                "max_rows": max_rows, "exact": exact or None, "interval": interval or None, "resume": resume,
                "groups": groups,
            }  # fmt: skip
            return sketching.compare_sketches(
                things, measures, names=all_names, draws=draws_of(null, draws), seed=seed, decided=decided
            )
        request = Request(
            find_measures(DEFAULT if measures is None else measures, of="layers"),
            device=device,
            precision=precision,
            memory=parse_size(memory) or MEMORY,
            max_rows=max_rows,
            exact=exact,
            block=block,
            seed=seed,
            draws=draws_of(null, draws),
            interval=interval,
            groups=None if groups is None else read_labels(groups, "groups"),
        )
        all_sites = for_each("sites", len(things), sites_a, sites_b, sites)
        rules = for_each("rows", len(things), rows_a, rows_b, rows)
        for rule in rules:
            check_rule(rule)
        prepares = for_each("prepare", len(things), prepare_a, prepare_b)
        options: dict[str, Any] = {"inputs": inputs, "device": device}
        sources = [
            open_network(thing, name=name, sites=of_thing, rows=rule, prepare=prepare, **options)
            for thing, name, of_thing, rule, prepare in zip(things, all_names, all_sites, rules, prepares, strict=True)
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
    """Read the data once, or this process's share of it; the first process returns the result for all."""
    if resume is not None and len(sources) != 2:
        raise ValueError("resume= is for one pair of models; compare the pairs one by one")
    identities = [source.identity() for source in sources]
    twins = [identities.index(identity) for identity in identities]
    with ExitStack() as stack:
        stack.enter_context(borrowed([source.model for source in sources if isinstance(source, Network)]))
        for k in dict.fromkeys(twins):
            stack.enter_context(sources[k].opened())
        stream = Stream.of(data, sources, request.max_rows)
        saved_chunk(sources, request.memory, TRIED)  # raises if rows are too long to be looked at
        run = Pass(sources, twins, stream, request, in_parts=resume is not None)
        ranks.agree(
            lambda: {
                **_made_with(sources, stream, request),
                "the first batch": "" if stream.first is None else digest_of(stream.first),
                "the number of inputs": str(stream.total),
                "the sites": repr(run.sides),
                "the plan": repr(run.plan),
            }
        )
        pair = run.partials[0, 1]
        if resume is not None:
            pair.made_with, pair.first_rows = _made_with(sources, stream, request), run.sampled_rows(stream.first)
            pair.made_up = run.made_up_rows(stream.first)
        checkpoint = ResumeFile(resume, pair, sources)
        skip = ranks.once(checkpoint.restore)
        run.resume()
        block = request.block if "grams" in run.plan.statistics else None
        chunks = stream.chunks(
            block=block,
            skip=skip,
            largest=chunk_on_cpu(sources, run.sides),
            share=ranks.share,
            skipped=checkpoint.check_skipped if ranks.first else None,
            saved_chunk=saved_chunk(sources, request.memory, block or TRIED),
        )
        task = f"comparing {' and '.join(dict.fromkeys(source.name for source in sources))}"
        expected = None if stream.expected is None else -(-stream.expected // ranks.share.of)
        with Progress(task, expected, "inputs", shown=ranks.first) as bar:
            bar.advance(pair.inputs)
            for chunk in ranks.deal(chunks, run):
                run.read(chunk)
                bar.advance(chunk.count)
                checkpoint.digest(chunk)
                if checkpoint.due() and not ranks.several:  # of several processes, none has all statistics
                    run.settle()
                    checkpoint.save()
        for network in run.unique.values():
            if isinstance(network, Network):
                network.note_after_pass()
        run.settle()
        run.gather(ranks)
        ranks.collect(checkpoint.digests, lambda digests: add_digests(checkpoint.digests, digests.items()))

    def result() -> Comparison | Comparisons:
        run.check_groups(pair.inputs)
        checkpoint.save()
        models = [source.describe() for source in sources]
        about = provenance(settings=request.as_text(), models=models, data=data, processes=ranks.several)
        values = run.finish(about)
        return values[0, 1] if len(sources) == 2 else Comparisons(tuple(source.name for source in sources), values)

    return ranks.once(result)


def _made_with(sources: Sequence[Source], stream: Stream, request: Request) -> dict[str, str]:
    """The digests that saved statistics, and processes that share the work, must have in common."""
    return {
        "models": " ".join(source.digest() for source in sources),
        "data": "" if stream.first is None else digest_of(cut(stream.first, 0, 1)),
        "settings": f"block {request.block}, seed {request.seed}, precision {request.precision or 'default'}"
        + ("" if request.groups is None else f", groups {digest_of(request.groups.tolist())}"),
    }


# The pass: every network reads the same chunk, and each pair's statistics grow


class Inspector:
    """Checks Σ x² and the offset of the mean at every site and chunk, without waiting for a GPU.

    On a CPU they are checked at once. On a GPU they are copied while the next chunk runs, and checked then.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Sequence[str], Callable[[], Tensor], Sequence[float]]] = []
        self.offsets: dict[tuple[str, str], float] = {}

    def take(self, source: str, sites: Sequence[str], numbers: Tensor, most: Sequence[float] = ()) -> None:
        """`numbers` (2, sites): Σ x², and the offset of the mean; `most`: limits of Σ x² if rows were not checked."""
        self._waiting.append((source, sites, sent_to_cpu(numbers), most))
        self.finish(keep=2 if numbers.is_cuda else 0)

    def finish(self, keep: int = 0) -> None:
        while len(self._waiting) > keep:
            source, sites, arrived, most = self._waiting.pop(0)
            sums, offsets = arrived().tolist()
            bad = [site for site, total in zip(sites, sums, strict=True) if not math.isfinite(total)]
            if bad:
                raise ValueError(
                    f"{source}: activations are NaN or infinite (or too large to square) at {listed(bad)}. "
                    "Check the input's normalisation and the weights (it starts at the first site named), or use "
                    "precision='float64' if the numbers are right"
                )
            for site, total, limit in zip(sites, sums, most or sums, strict=True):
                if total > limit:
                    float32 = limit == FLOAT32_SQUARES
                    raise ValueError(
                        f"{source}: the numbers at {site} grew after the first batch, too large for products in "
                        + ("float32: use precision='float64'" if float32 else "float64: scale them down")
                    )
            for site, offset in zip(sites, offsets, strict=True):
                key = (source, site)
                self.offsets[key] = max(self.offsets.get(key, 0.0), offset)


class PartMaker:
    """Makes the parts of one source's statistics from the rows of each site, and puts those of a chunk together.

    It is called inside the forward pass, for every site of every chunk and, on a GPU, while that waits: it enters no
    context unless one is needed. The watch has left autocast already.
    """

    def __init__(
        self,
        source: Source,
        makers: dict[StatisticKind, Any],
        plan: Plan,
        request: Request,
        meet: Callable[[torch.device], torch.device],
        order: OrderTest | None,
    ) -> None:
        """`meet`: from the device of the first rows to the one where the rows of all sources meet."""
        self.makers, self.order, self.start = makers, order, 0  # start: the index of the chunk's first row
        self._name, self._saved = source.name, isinstance(source, SavedActivations)
        self._largest = dict(source.largest)  # by site
        # Whether products of a site's rows need float64; unknown before its first rows, then checked again as needed.
        self._wide: dict[str, bool] = {}
        self._meet, self._block = meet, plan.block
        self._double, self._tf32 = request.precision == "float64", request.tf32
        self._only_grams = plan.statistics == ["grams"]

    def __call__(self, site: str, rows: Tensor) -> list[Any]:
        """The part of each statistic for the rows of a site."""
        if self.order is not None and site in self.order.sites:
            self.order.keep(site, rows, self.start)
        device = self._meet(rows.device)
        in_forward = rows.device == device and not self._saved
        if self._double or rows.device != device:
            rows = rows.to(device, torch.float64 if self._double else rows.dtype)
        if self._only_grams and in_forward and not rows.is_cuda and self._wide.get(site) is False:
            return [self._checked_grams(site, rows)]
        if self._needs_float64(site, rows):
            rows = rows.double()
        with self._precision(rows) if in_forward else products(tf32=self._tf32 and self._only_grams):
            return [maker.part(site, rows, self.start) for maker in self.makers.values()]

    def _checked_grams(self, site: str, rows: Tensor) -> Any:
        """On a CPU the Gram matrices themselves show whether the numbers have grown since the first chunk."""
        part = self.makers["grams"].part(site, rows, self.start)
        if part.is_finite():
            return part
        self._check(site, rows, largest_number(rows))
        return self.makers["grams"].part(site, rows.double(), self.start)

    def _needs_float64(self, site: str, rows: Tensor) -> bool:
        wide = self._wide.get(site)
        if wide is None or not (wide or rows.is_cuda):
            # A GPU would have to be waited for: there the first few inputs decide, and `limits` are for the rest.
            if not (rows.is_cuda and self._largest.get(site)):
                self._largest[site] = max(self._largest.get(site, 0.0), largest_number(rows))
            self._check(site, rows, self._largest[site])
        return self._wide[site]

    def _check(self, site: str, rows: Tensor, most: float) -> None:
        """Decide whether the products need float64; raise if even float64 is too small."""
        self._wide[site] = lacks_room(rows, f"{site} of {self._name}", most)

    def _precision(self, rows: Tensor) -> AbstractContextManager[None]:
        """The context for products of rows; none is needed on a CPU, nor for the kernel of Gram matrices of blocks."""
        n, block = len(rows), self._block
        last = n if n < 2 * block else block + n % block  # rows of the last block
        fits = self._only_grams and last <= gram_cuda.TILE and rows.dtype in gram_cuda.READS
        if not rows.is_cuda or (fits and gram_cuda.available()):
            return nullcontext()
        return products(tf32=self._tf32 and self._only_grams)

    def chunk(self, parts: list[list[Any]]) -> dict[StatisticKind, Any]:
        """All sites of a chunk together, for each statistic."""
        return {
            kind: maker.side([of_site[number] for of_site in parts], self.start)
            for number, (kind, maker) in enumerate(self.makers.items())
        }

    def limits(self, side: Side) -> list[float]:
        """The largest Σ x² of a chunk at each site, where rows were not checked before their products were made."""
        in_float64 = [
            self._double or self._wide[site] or dtype == "float64"
            for site, dtype in zip(side.sites, side.dtypes, strict=True)
        ]
        return [FLOAT64_SQUARES if fine else FLOAT32_SQUARES for fine in in_float64]


class Pass:
    """One pass over the data: opened sources read chunk by chunk, and each pair's statistics grow.

    `twins[k]` is the first source that gives the same rows as source k; it is run for both.
    """

    def __init__(
        self, sources: Sequence[Source], twins: Sequence[int], stream: Stream, request: Request, *, in_parts: bool
    ) -> None:
        """Look at the first few inputs, and plan; `in_parts`: the plan must be the same for every part of the data."""
        self.sources, self.twins, self.request = sources, twins, request
        self.unique = {k: sources[k] for k in dict.fromkeys(twins)}
        looks = {k: source.look(stream.first) for k, source in self.unique.items()}
        self.sides = [replace(looks[twin], name=source.name) for twin, source in zip(twins, sources, strict=True)]
        for source in self.unique.values():
            if isinstance(source, Network):
                source.mixing(stream.first)
        self._fold_of_row: Tensor | None = None  # by its group
        self._first_input, self._in_parts = stream.first_row, in_parts
        self._most_inputs = sys.maxsize if request.max_rows is None else stream.first_row + request.max_rows
        self.per_input = rows_per_input(list(self.unique.values()))
        self._reads_inputs = any("inputs" in measure.needs for measure in request.measures)
        if self.per_input != 1 and self._reads_inputs:
            raise ValueError("measures that regress the inputs out need one row per input, not rows='positions'")

        # With several models the widest pair decides, so that all pairs use the same statistics.
        pairs = list(itertools.combinations(range(len(sources)), 2))
        rows = None if stream.expected is None or in_parts else stream.expected * self.per_input
        *_, second, widest = sorted((side.widths for side in self.sides), key=sum)
        self.plan = make_plan(
            request, (second, widest), rows, budget=request.memory // len(pairs), blocks=self.per_input == 1
        )
        self._numpy = self.plan.statistics != ["grams"]  # whether NumPy has a part in sums of chunks
        self._entries = max(sum(a.widths) * sum(b.widths) for a, b in itertools.combinations(self.sides, 2))
        if request.groups is not None:
            if stream.expected is not None:
                self.check_groups(stream.expected)
            # Parts of the data take all labels, so that a group is in the same fold in every part.
            labels = request.groups if in_parts else request.groups[: self._most_inputs]
            fold_of = torch.from_numpy(grouped_folds(labels, *request.folds))
            self.plan = replace(self.plan, fold_of=fold_of)
            self._fold_of_row = fold_of.repeat_interleave(self.per_input)
        self.first_row = stream.first_row * self.per_input
        self.partials = {
            (i, j): Partial(
                side_a=self.sides[i],
                side_b=self.sides[j],
                kinds=self.plan.kinds,
                rows_rule=rules_in_words(sources[i].rule, sources[j].rule),
                rows=self.first_row,
                first_input=stream.first_row,
                notes=self.plan.notes,
                draws=request.draws,
                seed=request.seed,
                interval=request.interval,
                grouped=request.groups is not None,
                max_rows=request.max_rows,
            )
            for i, j in pairs
        }

        self._pairing = {
            (i, j): () if stream.first_row else pairing_notes(sources[i], sources[j], stream.first) for i, j in pairs
        }
        self._sampler = RowSampler(self.plan.sample_rows, request.seed) if "sample" in self.plan.statistics else None
        rows = None if stream.expected is None else stream.expected * self.per_input
        spread = RowSampler(ROWS, request.seed, of=rows)
        tested = self.unique if "grams" in self.plan.statistics else ()
        self._order = {k: OrderTest(spread, self.sides[k]) for k in tested}
        self._makers = {
            k: PartMaker(
                source,
                {
                    kind: self.plan.maker(kind, self._sampler, per_input=self.per_input, tf32=self.request.tf32)
                    for kind in self.plan.statistics
                },
                self.plan,
                request,
                self._meet,
                self._order.get(k),
            )
            for k, source in self.unique.items()
        }
        self._inspector = Inspector()
        self._device: torch.device | None = None
        self._start = 0  # the index of the chunk's first row among all rows

    def resume(self) -> None:
        """Continue from the statistics that the first pair has from a file."""
        pair = self.partials[0, 1]
        if pair.inputs:
            samples = dict(zip(self.twins, pair.order_samples, strict=True))
            for k, order in self._order.items():
                order.add(samples[k])

    def sampled_rows(self, batch: Any) -> list[RowSample]:
        """A few numbers of the rows that each source makes of the first few inputs."""
        samples = {k: source.sampled_rows(batch) for k, source in self.unique.items()}
        return [samples[twin] for twin in self.twins]

    def made_up_rows(self, batch: Any) -> MadeUpRows | None:
        """What the networks make of made-up inputs in the shape of the first few."""
        networks = {k: source for k, source in self.unique.items() if isinstance(source, Network)}
        if not networks:
            return None
        inputs, shapes = made_up_inputs(cut(batch, 0, min(TRIED, count_inputs(batch))))
        samples: dict[int, RowSample] = {}
        for k, network in networks.items():
            try:
                samples[k] = network.sampled_rows(inputs)
            except Exception:  # a model may refuse such inputs: then nothing is compared
                samples[k] = {}
        tolerated = [source.tolerated() for source in self.sources]
        return MadeUpRows(shapes, [samples.get(twin, {}) for twin in self.twins], tolerated)

    def _meet(self, device: torch.device) -> torch.device:
        """The device where the rows of all sources meet, which the first rows decide."""
        if self._device is None:
            self._device = meeting_place(device)
        return self._device

    def read(self, chunk: Chunk) -> None:
        """Let every source read a chunk, and add its statistics; other processes may have read the chunks before it."""
        first = self.partials[0, 1]
        self._start = first.rows + (chunk.start - first.inputs) * self.per_input
        self.check_groups(chunk.start + chunk.count, all_read=False)
        inputs = self._input_rows(chunk)
        read = {k: self._read(k, chunk) for k in self.unique}
        check_positions(list(self.unique.values()))
        few = chunk.count * self.per_input * self._entries <= FEW_PRODUCTS
        with products(one_core=self._numpy), one_thread if few else nullcontext():
            self._join([read[k] for k in self.twins], chunk, inputs)

    def settle(self) -> None:
        """Finish pending checks and merges, before the statistics are saved or read."""
        self._inspector.finish()
        samples = {k: order.sample() for k, order in self._order.items()}
        for pair, partial in self.partials.items():
            partial.settle()
            partial.order_samples = (samples.get(self.twins[pair[0]]), samples.get(self.twins[pair[1]]))
            partial.mixing = notes_of_pass(self.sources[self.twins[k]] for k in pair) + self._pairing[pair]

    def _input_rows(self, chunk: Chunk) -> Tensor | None:
        """The sampled rows of the networks' inputs, if a measure needs them."""
        if not self._reads_inputs or self._sampler is None:
            return None
        rows = input_rows(chunk.batch, chunk.count)
        return rows[torch.from_numpy(self._sampler.draw(self._start, chunk.count) - self._start).to(rows.device)]

    def _read(self, k: int, chunk: Chunk) -> dict[StatisticKind, Any]:
        """One source's statistics of a chunk: a part for each site as activations appear, then all sites at once."""
        maker = self._makers[k]
        maker.start = self._start
        with one_thread if self._numpy else nullcontext():
            parts = self.sources[k].read(chunk, maker)
        check_positions([self.sources[k]])
        if k in self._order and self._device is not None:
            self._order[k].end_chunk(self._start, chunk.count, self._device)
        with products(one_core=self._numpy):
            statistics = maker.chunk(parts)
            self._inspect(k, statistics)
        return statistics

    def _inspect(self, k: int, statistics: dict[StatisticKind, Any]) -> None:
        name, side, maker = self.sources[k].name, self.sides[k], self._makers[k]
        numbers = torch.stack([of_kind.check for of_kind in statistics.values()]).sum(0)
        # On a CPU every chunk was checked before its products were made.
        self._inspector.take(name, side.sites, numbers, maker.limits(side) if numbers.is_cuda else [])
        if "grams" in statistics:
            for (source, site), offset in self._inspector.offsets.items():
                if source == name:
                    maker.makers["grams"].notice(site, offset)

    def _join(self, read: list[dict[StatisticKind, Any]], chunk: Chunk, inputs: Tensor | None) -> None:
        block, request = self.plan.block, self.request
        first_block = self._start // block  # blocks go on counting on resuming, and in a later part of the data
        for (i, j), partial in self.partials.items():
            rows = 0
            for kind in self.plan.statistics:
                a, b = read[i][kind], read[j][kind]
                joined: Collected
                if kind == "grams":
                    joined = Grams.join(
                        a, b, block=block, first_block=first_block, draws=request.draws, seed=request.seed
                    )
                elif kind == "splits":
                    joined = SplitMoments.join(a, b)
                else:
                    joined = Moments.join(a, b) if kind == "moments" else Sample.join(a, b, inputs, self._fold_of_row)
                partial.add(kind, joined)
                rows = joined.seen if isinstance(joined, Sample) else joined.n
            held_out = "splits" in self.plan.statistics or self.plan.fold_of is not None
            if held_out and rows != chunk.count * self.per_input:
                raise ValueError(
                    f"{chunk.count} inputs gave {rows} rows instead of {self.per_input} each, so the rows of an input "
                    f"cannot be kept in one fold: take {ONE_ROW}"
                )
            partial.inputs += chunk.count
            partial.rows += rows

    def check_groups(self, inputs: int, *, all_read: bool = True) -> None:
        """Raise unless there are as many labels of groups as inputs; a part of the data may have those of all."""
        if self.request.groups is not None:
            labels, last = len(self.request.groups), self._first_input + inputs
            fewer = all_read and not self._in_parts and last < min(labels, self._most_inputs)
            if last > labels or fewer:
                more = "" if all_read else " or more"
                raise ValueError(f"groups must have one label for each input, got {labels} for {last}{more}")

    # Several processes

    def learnt(self) -> list[dict[StatisticKind, Any]]:
        """What the makers have learned from the first chunk: centres, mostly."""
        learnt = [{kind: maker.learnt for kind, maker in of.makers.items()} for of in self._makers.values()]
        return [on_device(of_makers, torch.device("cpu")) for of_makers in learnt]

    def learn(self, learnt: list[dict[StatisticKind, Any]]) -> None:
        for of, of_first in zip(self._makers.values(), learnt, strict=True):
            for kind, maker in of.makers.items():
                maker.learnt.update(of_first[kind])

    def gather(self, ranks: SingleProcess) -> None:
        """Add the statistics of all processes in the first one, in their order."""
        if not ranks.several:
            return
        for partial in self.partials.values():
            # Which rows are sampled depends on their index, so on all inputs before, which other processes have read.
            rows = partial.rows - self.first_row
            if "sample" in self.plan.statistics and rows != partial.inputs * self.per_input:
                raise ValueError(
                    f"{partial.inputs} inputs gave {rows} rows instead of {self.per_input} each: rows='positions' of "
                    "texts of different lengths cannot be numbered by several processes. Compare in one (with "
                    f"sosie.engine.single_process()), or take {ONE_ROW}"
                )

        offsets = self._inspector.offsets

        def absorb(sent: tuple[dict[Pair, Partial], dict[int, Sample | None], dict[tuple[str, str], float]]) -> None:
            partials, samples, sent_offsets = sent
            for k, order in self._order.items():
                if samples[k] is not None:  # a process may have read nothing
                    order.add(samples[k])
            for pair, partial in self.partials.items():
                partial.absorb(partials[pair], self.first_row)
            for key, offset in sent_offsets.items():
                offsets[key] = max(offsets.get(key, 0.0), offset)

        partials = {} if ranks.first else {pair: partial.on_cpu() for pair, partial in self.partials.items()}
        samples = {k: on_device(order.sample(), torch.device("cpu")) for k, order in self._order.items()}
        ranks.collect((partials, samples, offsets), absorb)
        self.settle()

    def finish(self, provenance: dict[str, Any]) -> dict[Pair, Comparison]:
        """The values of every pair."""
        strained = {key: offset for key, offset in self._inspector.offsets.items() if offset > TOLERATED_OFFSET}
        for partial in self.partials.values():
            partial.strained = strained
        return {pair: partial.finish(provenance) for pair, partial in self.partials.items()}
