"""Models into a zoo: one, or many whose fingerprints are made elsewhere; the writing is done here."""

from __future__ import annotations

import os
import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models import NamedModel
from ..progress import Progress
from .fingerprints import Fingerprint
from .probe_file import gone
from .store import Facts, NameTaken, Record, check_name, check_tags
from .tables import Added
from .tasks import Failure, NoProbe, Outcome, Same, Task, is_fingerprint_file, make, make_all, reason_of

if TYPE_CHECKING:
    from .zoo import Zoo

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
