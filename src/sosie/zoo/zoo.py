"""A zoo: a folder of models, as fingerprints on one probe set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..capture import ONE_ROW
from ..checks import check_options, renamed, whole_number
from ..models import NamedModel
from ..progress import Progress
from ..results import Array, Clusters, Duplicates, Family, Map, Neighbours, Recommendation
from ..results.tables import MOST_SHOWN
from .fingerprints import PROBE_GONE, PROBES, Fingerprint, Probe, Settings
from .index import build
from .listing import SHOWN, Listing, failures, models
from .questions import SAME, find_clusters, find_duplicates, lay_out, square_of, vectors_of
from .search import as_query, find_family, search
from .store import Facts, Filter, NameTaken, Record, Store, check_filters, check_tags, new_folder
from .tasks import (
    NO_PROBE,
    OPTIONS,
    UNCHANGED,
    Outcome,
    Task,
    default_name,
    make,
    make_all,
    reason_of,
    task_of,
    tasks_of,
)
from .upkeep import Report, check, compact, export, import_

if TYPE_CHECKING:
    from ..capture import Rule

# What a zoo returns beside the answers of `sosie.results`


@dataclass(frozen=True)
class Added:
    """The outcome of adding several models: new, there already, or failed with the reason."""

    added: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        present = [("added", self.added), ("there already", self.there)]
        rows = [{"name": name, "outcome": outcome, "reason": None} for outcome, names in present for name in names]
        return rows + [{"name": name, "outcome": "failed", "reason": why} for name, why in self.failed.items()]

    def __repr__(self) -> str:
        return f"<Added {len(self.added)}, there already {len(self.there)}, failed {len(self.failed)}>"


WAIT = 10.0  # seconds for another writer
GROUP = 16  # ready fingerprints written in one transaction


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry(Record):
    """A model of a zoo with its facts; its fingerprint is read on first use."""

    zoo: Zoo = field(repr=False)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return self.zoo.settings.fingerprint(self.zoo.store.read(self.id))


class Zoo:
    """A folder of models, as fingerprints on a probe set that is pinned when the folder is made.

    `Zoo("zoo/", data=probe)` makes it; afterwards `Zoo("zoo/")` opens it. `data`: what `sosie.compare` takes, or a
    string that names data; the first `max_rows` (256) are used. If given again, it must be the same.
    `size`, `seed`, `kinds`, `rows`: as in `sosie.zoo.fingerprint`; also pinned. `wait`: seconds to wait for another
    writer. One process writes at a time, any number read meanwhile; a process killed at any moment leaves the zoo
    with all models that were complete.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data: Any = None,
        *,
        max_rows: int | None = None,
        size: int | None = None,
        seed: int | None = None,
        kinds: str | Sequence[str] | None = None,
        rows: Rule | None = None,
        wait: float = WAIT,
        inputs: int | None = None,
    ) -> None:
        max_rows = renamed(inputs, max_rows, "inputs", "max_rows")
        self.folder = Path(folder)
        self._data: Probe | None = None
        options: dict[str, Any] = {"size": size, "seed": seed, "kinds": kinds, "rows": rows}
        options = {name: value for name, value in options.items() if value is not None}
        if not (self.folder / "zoo.sqlite").is_file():
            if data is None:
                raise FileNotFoundError(
                    f"no zoo in {self.folder}: to make one, give the inputs for all models as data= "
                    "(`sosie zoo init FOLDER --data …`)"
                )
            self._data = Probe.of(data, PROBES if max_rows is None else max_rows)
            if rows is None and self._data.is_padded:
                raise ValueError(
                    "the inputs are texts of different lengths, whose rows cannot be flattened: make the zoo with "
                    f"{ONE_ROW} (--rows mean)"
                )
            settings = Settings(self._data.digest, self._data.n, **options)
            with new_folder(self.folder) as temporary:
                self._data.save(temporary / "probe.safetensors")
                Store.create(temporary, settings.as_json(), wait)
        self.store = Store(self.folder, wait)
        self.settings = Settings.from_json(self.store.about())
        self.settings.check_same(options, self.folder)
        if data is not None:
            self._data = self._data or Probe.of(data, self.settings.n if max_rows is None else max_rows)
            self.settings.check_probe(self._data, self.folder)

    @cached_property
    def probe(self) -> Probe:
        """The inputs that all models see."""
        return Probe.load(self.probe_path, self.settings.probe)

    @property
    def probe_path(self) -> Path:
        """The file of the probe set."""
        return self.folder / "probe.safetensors"

    def add(
        self,
        models: Any,
        name: str | None = None,
        *,
        tags: Iterable[str] | str = (),
        task: str | None = None,
        source: str | None = None,
        parent: str | None = None,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
        replace: bool = False,
        executor: Executor | None = None,
        workers: int = 0,
        **options: Any,
    ) -> Entry | Added:
        """Add a model, or several as {name: model} or as pairs (name, model); each is written when it is done.

        A model is a module, a string that specifies one, a `Fingerprint`, or a file with one. If the zoo has that model
        under that name, only its facts are updated; with other weights, modules or `sites` it is an error, or with
        `replace` the new model takes its place. `facts` has tags, task, source and parent of each of several by name.
        `options` go to `fingerprint`: sites, prepare, device.

        Several models can be fingerprinted by an `executor` of concurrent.futures, or in `workers` processes. If one
        of them fails, it is recorded (`failed()`), the others go on, and the outcome of each is returned. A single
        model raises its error.
        """
        common = Facts(check_tags(tags), task, source, parent)
        check_options(options, OPTIONS, "add")
        one = isinstance(models, (str, os.PathLike, nn.Module, NamedModel, Fingerprint))  # a module may be iterable
        if not one and isinstance(models, Iterable):
            if name is not None:
                raise ValueError("several models bring their names as {name: model}: leave name= out")
            if executor is not None and workers:
                raise ValueError("an executor has its own workers: give executor= or workers=, not both")
            whole_number(workers, "workers", least=0)
            pairs = models.items() if isinstance(models, Mapping) else models
            tasks = tasks_of(self, pairs, common, facts or {}, options, replace)
            total = len(pairs) if isinstance(pairs, Sized) else None
            return self._add_several(make_all(tasks, executor, workers), replace, total)
        if executor is not None or workers or facts:
            raise ValueError("executor=, workers= and facts= are for several models: give {name: model}")
        only = task_of(self, default_name(models) if name is None else name, models, common, options, replace)
        try:
            outcome = make(only)
        except Exception as error:
            self.store.record_failure(only.name, reason_of(error), only.facts.source)
            raise
        if isinstance(outcome, Fingerprint):
            (stored,) = self.store.append([self.settings.record(only.name, outcome, only.facts)], replace=replace)
            if isinstance(stored, NameTaken):
                raise stored
        elif outcome == NO_PROBE:
            raise FileNotFoundError(PROBE_GONE.format(self.probe_path))
        else:  # it is there, unchanged
            self.store.change_facts(only.name, only.facts)
        return self[only.name]

    def _add_several(self, outcomes: Iterable[tuple[Task, Outcome]], replace: bool, total: int | None) -> Added:
        """Write each model when it is done, so that an interruption loses only the last; return all outcomes."""
        added: list[str] = []
        there: list[str] = []
        failed: dict[str, str] = {}
        waiting: list[Record] = []

        def fail(name: str, reason: str, source: str | None) -> None:
            failed[name] = reason
            if name not in self:
                self.store.record_failure(name, reason, source)

        def write() -> None:
            stored = self.store.append(waiting, replace=replace) if waiting else []
            for record, outcome in zip(waiting, stored, strict=True):
                if isinstance(outcome, NameTaken):
                    fail(record.name, str(outcome), record.source)
                else:
                    (added if outcome else there).append(record.name)
            waiting.clear()

        with Progress("fingerprinting", total, "models") as bar:
            try:
                for task, outcome in outcomes:
                    name, facts = task.name, task.facts
                    if isinstance(outcome, Fingerprint):
                        try:
                            waiting.append(self.settings.record(name, outcome, facts))
                        except (ValueError, TypeError) as error:
                            fail(name, reason_of(error), facts.source)
                    elif outcome == UNCHANGED:
                        self.store.change_facts(name, facts)
                        there.append(name)
                    elif outcome == NO_PROBE:
                        fail(name, PROBE_GONE.format(self.probe_path), facts.source)
                    else:
                        fail(name, outcome, facts.source)
                    if len(waiting) >= GROUP or not isinstance(task.model, Fingerprint):
                        write()
                    bar.advance(note=name if len(name) <= 30 else f"{name[:29]}…")
                write()
            except Exception as error:
                error.add_note(f"added before that, and in the zoo: {len(added):,}")
                raise
        return Added(tuple(added), tuple(there), failed)

    def fingerprint(self, model: Any, **options: Any) -> Fingerprint:
        """Return the fingerprint of any model that `search` takes, on the zoo's probe set, without adding it."""
        return as_query(self, model, **options).fingerprint

    def remove(self, *names: str) -> None:
        """Remove models at once, and forget failed ones; `compact` frees their space."""
        self.store.remove(names)

    def tag(self, name: str, add: Iterable[str] | str = (), drop: Iterable[str] | str = ()) -> None:
        """Add tags to a model and drop others."""
        self.store.change_facts(name, Facts(check_tags(add)), check_tags(drop))

    def list(
        self,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        *,
        limit: int | None = None,
        offset: int = 0,
    ) -> Listing:
        """List models in the order they were added, with all of the tags, an architecture and a task of those given."""
        return models(self.store, check_filters(tag, architecture, task), limit, offset)

    def failed(self) -> Listing:
        """List the models that could not be fingerprinted, with the reason, until they are added after all."""
        return failures(self.store)

    def __len__(self) -> int:
        return self.store.count()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isprintable() and self.store.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.names())

    def __getitem__(self, name: str) -> Entry:
        return Entry(zoo=self, **vars(self.store.read(name, kinds=())))

    # Questions

    def search(
        self,
        model: Any,
        k: int = 10,
        kind: str = "cka",
        by: str = "model",
        *,
        site: str | Sequence[str] | None = None,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        rerank: int = 50,
        exact: bool = True,
        symmetric: bool = False,
        index: bool | None = None,
        **options: Any,
    ) -> Neighbours:
        """Return the `k` models or layers nearest to a model of the zoo by name, a fingerprint, or any other model.

        `by="model"` sorts models by the mean over the query's sites (all, or those named by `site`) of the largest
        similarity with one of their sites; `symmetric` averages it with the opposite direction. `by="layer"` returns
        the `k` nearest sites for each of the query's sites. A model of the zoo does not find itself.

        `kind`: "cka", "weights" or "atoms", as in `sosie.zoo.fingerprint`; atoms are compared at the same layer only.
        All short vectors are searched; the best `rerank` are then sorted by the whole ones, whose cosine is debiased
        CKA (`exact`; kind "cka" only). `tag`, `architecture`, `task`: as in `list`.
        `index`: whether candidates come from the index that `index` made; None uses it if it is there and fits.
        `options` (sites, prepare, device) are for a model that is not in the zoo.
        """
        return search(
            self, as_query(self, model, **options), k=k, kind=kind, by=by, site=site, rerank=rerank, exact=exact,
            symmetric=symmetric, index=index, filters=check_filters(tag, architecture, task),
        )  # fmt: skip

    def index(self, kind: str = "cka", *, lists: int | None = None) -> dict[str, Any]:
        """Make an index for large zoos (faiss, `sosie[zoo]`) in a file beside the vectors, or bring it up to date.

        Searches then look at the rows in 1/32 of its `lists` (√rows by default), and at those added since. Values are
        still computed from the vectors: the index only says where to look. Return what it covers.
        """
        vectors = vectors_of(self, kind)
        index = build(vectors, lists=lists)
        return {"kind": vectors.kind, "rows": index.rows, "lists": index.lists, "bytes": index.bytes}

    def similar_layers(
        self, model: Any, site: str | Sequence[str] | None = None, k: int = 10, **how: Any
    ) -> Neighbours:
        """Return the `k` layers of other models nearest to each layer of a model: `search` with by="layer"."""
        return self.search(model, k, by="layer", site=site, **how)

    def similarities(
        self, kind: str = "cka", *, tag: Filter = None, architecture: Filter = None, task: Filter = None
    ) -> tuple[tuple[str, ...], Array]:
        """Return the names of up to 5,000 models and the similarities (N, N) of all pairs, those of `map`.

        For questions of your own: `sosie.shapes.spherical_mds(np.arccos(similarity.clip(-1, 1)))`.
        """
        return square_of(self, kind, check_filters(tag, architecture, task))

    def map(
        self,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        landmarks: int | None = None,
        seed: int = 0,
    ) -> Map:
        """Return models as points in the plane: classical multidimensional scaling of distances √(2 − 2 similarity).

        The similarity of two models is that of `search(symmetric=True)`, from the short vectors. More than 2,000 models
        are laid out around 500 `landmarks` drawn by `seed` (de Silva and Tenenbaum 2004). `stress` says how far the
        plane is from the distances, over all pairs, or over pairs of models and landmarks.
        """
        return lay_out(self, kind, seed, landmarks, check_filters(tag, architecture, task))

    def clusters(
        self,
        k: int | None = None,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        landmarks: int | None = None,
        seed: int = 0,
    ) -> Clusters:
        """Return models in `k` groups by Ward's linkage; None: the number from 2 to 20 with the largest silhouette.

        Of more than 5,000 models only 500 `landmarks` are clustered, half of them drawn by `seed`, half those least
        like the others; every other model joins the group whose landmarks it is most like on average.
        """
        return find_clusters(self, k, kind, seed, landmarks, check_filters(tag, architecture, task))

    def duplicates(
        self,
        threshold: float = SAME,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
    ) -> Duplicates:
        """Return models with the weights of an earlier one, or with a similarity of at least `threshold` at every site.

        The similarity is that of the whole vectors if there are any. CKA does not see rotations and scales, so a
        network with its neurons in another order is a duplicate. A lower threshold, such as .99, also finds models that
        were hardly trained further.
        """
        return find_duplicates(self, threshold, kind, check_filters(tag, architecture, task))

    def family(self, model: Any, k: int = 5, **options: Any) -> Family:
        """Return the `k` models that a model most likely comes from: the most similar at layers of the same name.

        Its recorded parent, children and siblings are always listed, and marked.
        """
        return find_family(self, model, k, options)

    def recommend(
        self,
        data: Any,
        k: int = 5,
        models: Mapping[str, Any] | None = None,
        *,
        probe_layer: str | int | None = None,
        by: str | None = None,
        max_rows: int = 1000,
        trust: bool = False,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        **options: Any,
    ) -> Recommendation:
        """Return the `k` best models for these data, each run on the first `max_rows` inputs, and those that failed.

        Models are opened from the source they were added with, or given as {name: model}. A source that is Python code
        is only run with `trust`; one whose weights have changed is refused.

        Without labels, the scores are those of `sosie.transfer`, averaged over layers; the smallest `mean_embedding`
        comes first. `probe_layer`, a layer by name or place (-2: the last but one), adds the accuracy of ridge
        regression from that layer, averaged over space, at inputs left out; then the largest comes first. `by`: the
        score to sort by instead. `options` go to `sosie.sketch`: sites, output, device.
        """
        from .recommend import recommend

        return recommend(
            self, data, k, models, by=by, trust=trust, probe_layer=probe_layer, max_rows=max_rows, options=options,
            filters=check_filters(tag, architecture, task),
        )  # fmt: skip

    # Upkeep

    def check(self, repair: bool = False) -> Report:
        """Check every byte of the vectors; `repair` drops models that lost some, and reports which.

        It restores a lost probe set if the zoo was opened with its `data`.
        """
        return check(self, repair, self._data)

    def compact(self) -> int:
        """Rewrite the vectors without those of removed models; return the number of bytes freed."""
        return compact(self.store)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the whole zoo, with its probe set, as one file, which `Zoo.import_` reads."""
        return export(self, Path(path))

    @classmethod
    def import_(cls, path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Zoo:
        """Make a zoo in a new folder from a file that `export` wrote; an inconsistent file is refused."""
        return import_(cls, Path(path), Path(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Zoo, wait=self.store.wait), (str(self.folder.absolute()),)

    def __repr__(self) -> str:
        return f"<Zoo {self.folder}: {len(self):,} models, probe {self.settings.probe} of {self.settings.n} inputs>"

    def _repr_html_(self) -> str:
        table = self.list(limit=MOST_SHOWN).html(SHOWN, len(self), "list()")
        return f"<p>{escape(repr(self)[1:-1])}</p>{table}"
