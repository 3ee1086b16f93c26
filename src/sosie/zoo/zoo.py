"""A zoo: models as fingerprints on one probe set, in a folder."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..files import DamagedFile
from ..models import NamedModel
from ..progress import Progress
from ..results import Clusters, Duplicates, Family, Map, Neighbours, Recommendation, counted
from ..results.tables import MOST_SHOWN, Rows, as_frame, cell, html_table
from .copies import SAME, find_duplicates
from .family import find_family
from .fingerprints import Fingerprint
from .folder import Settings, gone, load_probe, make_folder, save_probe
from .index import build
from .kinds import PROBES, Probe
from .questions import find_clusters, lay_out, mapped_of
from .search import Views, as_query, search
from .store import Facts, NameTaken, Record, Store, check_name, check_tags, several
from .tasks import Failure, NoProbe, Outcome, Same, Task, is_fingerprint_file, make, make_all, reason_of
from .upkeep import Problem, compact, find_problems, mend

if TYPE_CHECKING:
    import pandas

    from ..capture import Rule


# The questions that a zoo answers

Filter = str | Sequence[str] | None


class Asking(ABC):
    """What `Zoo` answers, from what it has stored."""

    folder: Path
    store: Store
    settings: Settings

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def __getitem__(self, name: str) -> Entry: ...

    @property
    @abstractmethod
    def probe_path(self) -> Path:
        """The file of the inputs that all models were shown."""

    @cached_property
    def views(self) -> Views:
        """Where the vectors are."""
        return Views(self.store)

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
        """The `k` models, or layers, nearest to a model: one of the zoo by name, a fingerprint, or any other model.

        `by="model"`: models are sorted by the mean over the query's sites (all, or those named by `site`) of the
        largest similarity with a site of theirs; `symmetric` averages that with the same the other way round.
        `by="layer"`: for each of the query's sites the `k` nearest sites. A model of the zoo does not find itself.

        `kind`: "cka", "weights" or "atoms", as in `sosie.zoo.fingerprint`; atoms meet those of the same layer only.
        All short vectors are gone through; the best `rerank` are then sorted by the whole ones, whose cosine is
        debiased CKA (`exact`; kind "cka" only). `tag`, `architecture`, `task`: as in `list`.
        `index`: whether candidates come from the index that `index` made; None: if there is one that fits.
        `options` (sites, prepare, device) are for a model that is fingerprinted now.
        """
        filters = _filters(tag, architecture, task)
        return search(
            self, as_query(self, model, **options), k=k, kind=kind, by=by, site=site, rerank=rerank, exact=exact,
            symmetric=symmetric, filters=filters, index=index,
        )  # fmt: skip

    def index(self, kind: str = "cka", *, lists: int | None = None) -> dict[str, Any]:
        """Make an index for large zoos (faiss, `sosie[zoo]`), in a file beside the vectors; or bring it up to date.

        Searches then look at the rows in one of 32 of its `lists` (√rows of them), and at those added since. The
        numbers found are worked out from the vectors: the index says only where to look. Returned is what it covers.
        """
        mapped = mapped_of(self, kind)
        head = build(mapped, self.views.indexes.of(mapped), lists=lists)
        return {"kind": mapped.kind, "rows": head.rows, "lists": head.lists, "bytes": head.bytes}

    def similar_layers(
        self, model: Any, site: str | Sequence[str] | None = None, k: int = 10, **how: Any
    ) -> Neighbours:
        """The `k` layers of other models nearest to a layer of a model: `search` with by="layer"."""
        return self.search(model, k, by="layer", site=site, **how)

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
        """Models as points in the plane: classical multidimensional scaling of distances √(2 − 2 similarity).

        The similarity of two models is that of `search(symmetric=True)`, from the short vectors. Of more than 2,000
        models, all are laid out around 500 `landmarks` drawn by `seed` (de Silva and Tenenbaum 2004). How far the
        plane is from the distances is its `stress`, over all pairs, or over those of models and landmarks.
        """
        filters = _filters(tag, architecture, task)
        return lay_out(self, kind, seed, landmarks, filters)

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
        """Models in `k` groups by Ward's linkage; None: as many, of 2 to 20, as have the largest mean silhouette.

        Of more than 5,000 models, 500 `landmarks` are put into groups, half of them drawn by `seed`, half those least
        like the rest, and each other model joins the group whose landmarks it is most like on average.
        """
        filters = _filters(tag, architecture, task)
        return find_clusters(self, k, kind, seed, landmarks, filters)

    def duplicates(
        self,
        threshold: float = SAME,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
    ) -> Duplicates:
        """Models with the weights of one added before, or alike at every site: similarity of `threshold` or more.

        By the whole vectors where there are any. CKA does not see rotations and scales, so that a network with its
        neurons in another order is a duplicate. A lower threshold, as .99, finds those that were hardly trained on.
        """
        return find_duplicates(self, threshold, kind, _filters(tag, architecture, task))

    def family(self, model: Any, k: int = 5, **options: Any) -> Family:
        """Which base does a model come from? The `k` models most like it at layers of the same name, of every kind.

        Those recorded as its parent, children and siblings are always there, and marked.
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
        """Which model for these data? Each is run on the first `max_rows` inputs; the `k` best, and who failed.

        Models are opened again from the source that they were added with, or given as {name: model}. A source that is
        Python code is only run with `trust`. One whose weights have changed is not taken.

        Without labels: the transfer scores of `sosie.transfer`, means over layers, the smallest `mean_embedding`
        first. `probe_layer`, a layer by name or by its place (-2: the last but one): also the share of inputs that
        ridge regression from that layer, averaged over space, gives their label when they are left out; then the
        largest comes first. `by`: the score to sort by instead. `options` are of `sosie.sketch`: sites, output, device.
        """
        from .recommend import How, recommend

        filters = _filters(tag, architecture, task)
        return recommend(self, data, k, models, by, trust, How(probe_layer, max_rows, options), filters)


def _filters(tag: Filter, architecture: Filter, task: Filter) -> dict[str, Any]:
    """As they go into the answer, too: a set or a generator becomes a list."""
    given = {"tag": tag, "architecture": architecture, "task": task}
    return {
        name: value if value is None or isinstance(value, str) else list(several(value, name))
        for name, value in given.items()
    }


# What a zoo answers with: small tables and reports, as data


@dataclass(frozen=True)
class Listing(Rows):
    """Rows of one form, a dict each."""

    columns: tuple[str, ...]
    found: tuple[dict[str, Any], ...]

    def to_pandas(self) -> pandas.DataFrame:
        return as_frame(self.rows(), self.columns)

    def __repr__(self) -> str:
        names = [str(row.get("name", "")) for row in self.found[:4]]
        more = ", …" * (len(self.found) > len(names))
        return f"<Listing of {len(self.found)}: {', '.join(names)}{more}>"

    def _repr_html_(self) -> str:
        shown = self.found[:MOST_SHOWN]
        rows = [[cell(row.get(column)) for column in self.columns] for row in shown]
        return html_table(self.columns, rows, of=len(self.found))


@dataclass(frozen=True)
class Added:
    """What became of several models: new, there already, or failed with the reason."""

    added: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        some = [("added", self.added), ("there already", self.there)]
        found = [{"name": name, "outcome": outcome, "reason": None} for outcome, names in some for name in names]
        return found + [{"name": name, "outcome": "failed", "reason": why} for name, why in self.failed.items()]

    def __repr__(self) -> str:
        return f"<Added {len(self.added)}, there already {len(self.there)}, failed {len(self.failed)}>"


@dataclass(frozen=True)
class Report:
    """What `check` found: nothing, or problems; whether they were seen to."""

    models: int
    problems: tuple[dict[str, Any], ...]  # what, model, file, text, harmless, mended
    repaired: bool = False
    dropped: tuple[str, ...] = ()  # models that lost bytes and are no longer in the zoo

    @property
    def ok(self) -> bool:
        """No problem but what a killed writer left, which the next add overwrites."""
        return all(problem["harmless"] for problem in self.problems)

    @property
    def left(self) -> list[str]:
        """What is still amiss: all of it, or after a repair what no repair can bring back."""
        return [p["text"] for p in self.problems if not p["harmless"] and not p["mended"]]

    @property
    def lost(self) -> list[str]:
        """Models that do not have all of their bytes."""
        return list(dict.fromkeys(p["model"] for p in self.problems if p["what"] == "lost"))

    def rows(self) -> list[dict[str, Any]]:
        return [dict(problem) for problem in self.problems]

    def sentence(self) -> str:
        serious = sum(not problem["harmless"] for problem in self.problems)
        text = f"{counted(self.models, 'model')}, {counted(serious, 'problem') if serious else 'whole'}"
        if left := len(self.problems) - serious:
            text += f"; {counted(left, 'harmless leftover')} of an interrupted write"
        if self.repaired and self.problems:
            text += f"; {len(self.left):,} cannot be repaired" if self.left else "; repaired"
        return text + (f", dropped {', '.join(self.dropped)}" if self.dropped else "")

    def __repr__(self) -> str:
        return f"<Report: {self.sentence()}>"


def listing(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Listing:
    return Listing(tuple(columns), tuple({column: row[column] for column in columns} for row in rows))


WAIT = 10.0  # seconds for another writer
COLUMNS = (
    "name",
    "architecture",
    "parameters",
    "task",
    "tags",
    "sites",
    "kinds",
    "parent",
    "source",
    "added",
    "digest",
)


@dataclass(frozen=True, eq=False)
class Entry:
    """A model of a zoo: what is known of it; its fingerprint is read when it is asked for."""

    id: int
    name: str
    architecture: str
    parameters: int
    digest: str
    tags: tuple[str, ...]
    task: str | None
    source: str | None
    parent: str | None
    added: str
    absent: dict[str, str]
    about: dict[str, Any]
    _zoo: Zoo = field(repr=False)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return self._zoo.settings.fingerprint(self._zoo.store.read(self.id))


class Zoo(Asking):
    """Models in a folder, as fingerprints on a probe set that was pinned when the folder was made.

    `Zoo("zoo/", data=probe)` makes it; afterwards `Zoo("zoo/")` opens it. `data`: what `sosie.compare` takes, or a
    text that names data, of which the first `inputs` are taken (256). Given again, it must be the same.
    `size`, `seed`, `kinds`, `rows`: as `sosie.zoo.fingerprint` has them; pinned, too. `wait`: seconds to wait for
    another writer. One process writes at a time, any number read meanwhile; killed at any moment, the zoo has what
    was complete.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data: Any = None,
        *,
        inputs: int | None = None,
        size: int | None = None,
        seed: int | None = None,
        kinds: str | Sequence[str] | None = None,
        rows: Rule | None = None,
        wait: float = WAIT,
    ) -> None:
        self.folder = Path(folder)
        self._given: Probe | None = None
        options = {"size": size, "seed": seed, "kinds": kinds, "rows": rows}
        given = {name: value for name, value in options.items() if value is not None}
        if not (self.folder / "zoo.sqlite").is_file():
            if data is None:
                raise FileNotFoundError(
                    f"no zoo in {self.folder}: to make one, say which inputs all models are shown, with data= "
                    "(`sosie zoo init FOLDER --data …`)"
                )
            probe = Probe.of(data, PROBES if inputs is None else inputs)
            make_folder(self.folder, probe, Settings.of(probe, given), wait)
        self.store = Store(self.folder, wait)
        self.settings = Settings.from_json(self.store.database.about())
        self.settings.check_same(given, self.folder)
        if data is not None:
            self._given = Probe.of(data, self.settings.n if inputs is None else inputs)
            self.settings.check_probe(self._given, self.folder)

    @cached_property
    def probe(self) -> Probe:
        """The inputs that all models are shown."""
        return load_probe(self.probe_path, self.settings.probe)

    @property
    def probe_path(self) -> Path:
        """The file that they are in."""
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
        """Add a model, or several given as {name: model} or as pairs (name, model); written as each is done.

        A model is a module, a text that names one, a `Fingerprint`, or a file with one. One that is there under its
        name with the same weights is left as it is, and takes the facts given; with other weights it is an error, or
        with `replace` takes the old one's place. `facts` has tags, task, source and parent of each of several by name.
        `options` go to `fingerprint`: sites, prepare, device.

        Several may be fingerprinted by an `executor` of concurrent.futures, or in so many processes: `workers`. One
        that fails is recorded (`failed()`), the rest goes on, and what became of each is returned. One alone raises.
        """

        common = Facts(check_tags(tags), task, source, parent)
        if are_several(models):
            if name is not None:
                raise ValueError("several models have their names with them: {name: model}; leave name= out")
            pairs = models.items() if isinstance(models, Mapping) else models
            return add_many(
                self, pairs, common, facts or {}, options, replace=replace, executor=executor, workers=workers
            )
        if executor is not None or workers or facts:
            raise ValueError("executor=, workers= and facts= are for several models: give {name: model}")
        return self[add_one(self, models, name, common, options, replace=replace)]

    def fingerprint(self, model: Any, **options: Any) -> Fingerprint:
        """Of any model, as `search` takes it: made as all others here, on the probe set of the zoo, and not added."""
        return as_query(self, model, **options).fingerprint

    def remove(self, *names: str) -> None:
        """Remove models: they are gone at once, `compact` gives their room back; a failed one is forgotten."""
        self.store.remove(names)

    def tag(self, name: str, add: Iterable[str] | str = (), drop: Iterable[str] | str = ()) -> None:
        """Add tags to a model and drop others."""
        self.store.change_facts(name, Facts(check_tags(add)), check_tags(drop))

    def list(
        self,
        tag: str | Sequence[str] | None = None,
        architecture: str | Sequence[str] | None = None,
        task: str | Sequence[str] | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
    ) -> Listing:
        """The models in the order they were added: those with all of these tags, of one of these architectures …"""
        for what, number in (("limit", 0 if limit is None else limit), ("offset", offset)):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
                raise ValueError(f"{what}={number!r}: a whole number of at least 0")
        rows = self.store.rows(limit, offset, tag=tag, architecture=architecture, task=task)
        for row in rows:
            row["sites"] = row["kinds"].get("cka") or max(row["kinds"].values(), default=0)
            row["kinds"] = [kind for kind in row["kinds"] if kind != "exact"]
        return listing(rows, COLUMNS)

    def failed(self) -> Listing:
        """Models that could not be fingerprinted, with the reason; one that is added after all is no longer here."""
        return listing(self.store.failures(), ("name", "reason", "source", "at"))

    def __len__(self) -> int:
        return self.store.count()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isprintable() and self.store.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.all_names())

    def __getitem__(self, name: str) -> Entry:
        found = self.store.read(name, kinds=())
        facts = found.facts
        return Entry(
            found.id, found.name, found.architecture, found.parameters, found.digest, facts.tags, facts.task,
            facts.source, facts.parent, found.added, found.about["absent"], found.about["about"], self,
        )  # fmt: skip

    def check(self, repair: bool = False) -> Report:
        """Whether every byte is there that was written; `repair` drops models that lost some, and says which.

        A probe set that is lost is put back if the zoo was opened with its `data`.
        """
        if not repair:
            return self._report(self._problems())
        with self.store.writer():
            problems = self._problems()
            mended = mend(self.store, problems)
            if self._given is not None and any(problem.what == "probe" for problem in problems):
                save_probe(self._given, self.probe_path)
                mended |= {"probe"}
            return self._report(problems, mended)

    def _problems(self) -> Sequence[Problem]:
        while True:
            files = self.store.files()
            found = find_problems(self.store)
            if self.store.files() == files:  # else the zoo was compacted meanwhile
                break
        try:
            load_probe(self.probe_path, self.settings.probe)
        except (DamagedFile, OSError) as error:
            return [*found, Problem("probe", str(error), file=self.probe_path.name)]
        return found

    def _report(self, problems: Sequence[Problem], mended: Iterable[str] = ()) -> Report:
        lost = dict.fromkeys(p.model for p in problems if p.model is not None) if mended else ()
        told = ({**asdict(problem), "mended": problem.what in mended} for problem in problems)
        return Report(len(self), tuple(told), bool(mended), tuple(lost))

    def compact(self) -> int:
        """Rewrite the vectors without those of removed models; how many bytes that gave back."""
        return compact(self.store)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """The whole zoo as one file, with the probe set in it; `Zoo.import_` reads it."""
        from .archive import export

        return export(self, Path(path))

    @classmethod
    def import_(cls, path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Zoo:
        """A zoo from a file that `export` wrote, in a new folder; what does not add up in it is refused."""
        from .archive import import_

        return import_(cls, Path(path), Path(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder.absolute()), self.store.wait)

    def __repr__(self) -> str:
        return f"<Zoo {self.folder}: {len(self):,} models, probe {self.settings.probe} of {self.settings.n} inputs>"


def _reopen(folder: str, wait: float) -> Zoo:
    """In another process: a zoo travels as its folder's name."""
    return Zoo(folder, wait=wait)


# Models into a zoo: one, or many whose fingerprints are made elsewhere; the writing is done here

GROUP = 16  # fingerprints given as they are that are written in one transaction
_OPTIONS = ("sites", "prepare", "device")


def are_several(models: Any) -> bool:
    """{name: model}, or pairs; a module may be iterable too and is one."""
    one = (str, os.PathLike, nn.Module, NamedModel, Fingerprint)
    return not isinstance(models, one) and isinstance(models, (Mapping, Iterable))


def add_one(zoo: Zoo, model: Any, name: str | None, facts: Facts, options: Mapping[str, Any], *, replace: bool) -> str:
    """The name it has; an error is recorded, then raised."""
    name = check_name(default_name(model) if name is None else name)
    task = _task(zoo, name, model, options, replace)
    facts = _with_source(facts, model)
    try:
        outcome = make(task)
    except Exception as error:
        zoo.store.record_failure(name, reason_of(error), facts.source)
        raise
    if isinstance(outcome, NoProbe):
        raise gone(zoo.probe_path)
    if isinstance(outcome, Same):
        zoo.store.change_facts(name, facts)
    else:
        assert isinstance(outcome, Fingerprint)
        zoo.store.append([zoo.settings.record(name, outcome, facts)], replace=replace)
    return name


def add_many(
    zoo: Zoo,
    pairs: Iterable[tuple[str, Any]],
    common: Facts,
    facts: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    replace: bool,
    executor: Executor | None,
    workers: int,
) -> Added:
    """Every model with what became of it; written as each is done, so that an interruption loses only the last."""
    if executor is not None and workers:
        raise ValueError("an executor has its own workers: give executor= or workers=, not both")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"workers is a number of processes, got {workers!r}")
    if isinstance(pairs, ItemsView):  # all names are known: one that will not do is told before anything is done
        for name, _ in pairs:
            check_name(name)
        if strange := sorted({*facts} - {*dict(pairs)}):
            raise ValueError(f"facts of {strange[0]!r}, but no model of that name is given")
    total = len(pairs) if isinstance(pairs, Sized) else None
    writing = _Writing(zoo, replace)
    known = _Facts(common, facts)
    tasks = _tasks(zoo, pairs, known, options, replace)
    with Progress("fingerprinting", total, "models") as bar:
        try:
            for task, outcome in make_all(tasks, executor, workers):
                writing.take(task, outcome, known.of(task.name))
                bar.advance(note=task.name if len(task.name) <= 30 else f"{task.name[:29]}…")
            writing.flush()
        except Exception as error:
            error.add_note(f"added before that, and in the zoo: {len(writing.added):,}")
            raise
    return Added(tuple(writing.added), tuple(writing.there), writing.failed)


@dataclass
class _Facts:
    """Those of all, and those of each."""

    common: Facts
    each: Mapping[str, Mapping[str, Any]]
    made: dict[str, Facts] = field(default_factory=dict)

    def of(self, name: str) -> Facts:
        return self.made[name]

    def keep(self, name: str, model: Any) -> None:
        own = dict(self.each.get(name, {}))
        if unknown := sorted(set(own) - {"tags", "task", "source", "parent"}):
            raise ValueError(f"facts of {name!r} are tags, task, source and parent, not {', '.join(unknown)}")
        own["tags"] = (*self.common.tags, *check_tags(own.get("tags", ())))
        self.made[name] = _with_source(replace(self.common, **own), model)


@dataclass
class _Writing:
    """What has become of the models so far; fingerprints that come at once are written at once."""

    zoo: Zoo
    replace: bool
    added: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waiting: list[Record] = field(default_factory=list)

    def take(self, task: Task, outcome: Outcome, facts: Facts) -> None:
        name = task.name
        if isinstance(outcome, Same):
            self.zoo.store.change_facts(name, facts)
            self.there.append(name)
            return
        if not isinstance(outcome, Fingerprint):
            reason = outcome.reason if isinstance(outcome, Failure) else str(gone(self.zoo.probe_path))
            self._fail(name, reason, facts)
            return
        try:
            self.waiting.append(self.zoo.settings.record(name, outcome, facts))
        except (ValueError, TypeError) as error:
            self._fail(name, reason_of(error), facts)
            return
        if len(self.waiting) >= GROUP or not isinstance(task.model, Fingerprint):
            self.flush()

    def _fail(self, name: str, reason: str, facts: Facts) -> None:
        self.failed[name] = reason
        if name not in self.zoo:
            self.zoo.store.record_failure(name, reason, facts.source)

    def flush(self) -> None:
        records, self.waiting = self.waiting, []
        try:
            new = self.zoo.store.append(records, replace=self.replace) if records else []
        except NameTaken as error:
            if len(records) == 1:
                self._fail(records[0].name, str(error), records[0].facts)
            for record in records if len(records) > 1 else ():  # one by one, so that the others are written
                self.waiting = [record]
                self.flush()
            return
        for record, is_new in zip(records, new, strict=True):
            (self.added if is_new else self.there).append(record.name)


def _tasks(
    zoo: Zoo, pairs: Iterable[tuple[str, Any]], known: _Facts, options: Mapping[str, Any], replace: bool
) -> Iterator[Task]:
    seen: set[str] = set()
    for name, model in pairs:
        check_name(name)
        if name in seen:
            raise ValueError(f"the name {name!r} more than once: each model needs one of its own")
        seen.add(name)
        known.keep(name, model)
        yield _task(zoo, name, model, options, replace)


def _task(zoo: Zoo, name: str, model: Any, options: Mapping[str, Any], replace: bool) -> Task:
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(f"add has no option {', '.join(unknown)}; fingerprints take {', '.join(_OPTIONS)}")
    there = None if replace else zoo.store.digest(name)
    return Task(name, model, zoo.settings, str(zoo.probe_path.absolute()), there, dict(options))


def _with_source(facts: Facts, model: Any) -> Facts:
    if facts.source is not None:
        return facts
    if isinstance(model, NamedModel):
        return replace(facts, source=model.spec)
    named = isinstance(model, (str, Path)) and not is_fingerprint_file(model)
    return replace(facts, source=str(model)) if named else facts


def default_name(model: Any) -> str:
    """Of a specification: the name of its weights file, else the text without path separators."""
    if isinstance(model, NamedModel):
        return model.name
    if isinstance(model, (str, Path)):
        text = str(model)
        _, at, weights = text.rpartition("@")
        if (at and Path(weights).suffix) or is_fingerprint_file(text):
            return Path(weights if at else text).stem
        return re.sub(r"[/\\]+", "-", text).strip("-. ")
    raise ValueError(f"a {type(model).__name__} has no name of its own: give name=")
