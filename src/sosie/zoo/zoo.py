"""A zoo: models as fingerprints on one probe set, in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import DamagedFile
from .asking import Asking
from .fingerprints import PROBES, Fingerprint, Probe
from .folder import make_folder
from .probe_file import load_probe, save_probe
from .search import as_query
from .settings import Settings
from .store import Facts, Problem, Store, check_tags, compact, find_problems, mend
from .tables import Added, Listing, Report, listing

if TYPE_CHECKING:
    from ..capture import Rule

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
        from .adding import add_many, add_one, are_several

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
