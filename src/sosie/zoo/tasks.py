"""Fingerprints of many models: here, in processes of our own, or in any executor; a worker that dies is survived.

Only fingerprints are made elsewhere. Whoever asked gets them back and writes them.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..engine.network import Network
from ..files import OtherFile
from ..models import NamedModel, open_model, with_name
from .fingerprints import Fingerprint, Probe, Settings, fingerprint
from .store import Facts, check_name, check_tags

if TYPE_CHECKING:
    from .zoo import Zoo

OPTIONS = ("sites", "prepare", "device")  # of fingerprints, that may differ from model to model
WINDOW = 32  # twice as many tasks wait in somebody else's executor at one time
_opening = threading.Lock()  # models are built from the one global random state
UNCHANGED = "the very model is in the zoo: nothing to do"
DIED_TWICE = (
    "its worker process died twice: out of memory, or a crash below Python (a script that adds with workers= needs "
    '`if __name__ == "__main__":` around what it does)'
)
BROKEN = "the executor broke: a worker of it died. Add again with a fresh one: what is there stays"
CANNOT_TRAVEL = (
    "it cannot be sent to another process ({}): name it by a specification such as file.py:factory@weights, or use a "
    "ThreadPoolExecutor"
)
NO_PROBE = "the worker cannot see the folder of the zoo: it needs to be sent the inputs"


Outcome = Fingerprint | str  # or why there is none: UNCHANGED, NO_PROBE, or what went wrong


@dataclass(frozen=True)
class Task:
    """A model to be fingerprinted, as it is sent to a worker."""

    name: str
    model: Any  # a module, a specification, a file with a fingerprint
    settings: Settings
    probe_path: str
    known: str | None = None  # digest of the model of that name that is in the zoo
    options: dict[str, Any] = field(default_factory=dict)  # sites, prepare, device
    facts: Facts = field(default_factory=Facts)  # what is to be recorded of it
    probe: Probe | None = None  # where the worker cannot see the folder


def tasks_of(
    zoo: Zoo,
    pairs: Iterable[tuple[str, Any]],
    common: Facts,
    facts: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    again: bool,
) -> Iterator[Task]:
    """A task for each of several models: `facts` has those of each by name, beside those that all have in common."""
    if isinstance(pairs, ItemsView):  # all names are known, so a bad one is refused before any work
        for name, _ in pairs:
            check_name(name)
        if strange := sorted({*facts} - {*dict(pairs)}):
            raise ValueError(f"facts of {strange[0]!r}, but no model of that name is given")
    seen: set[str] = set()
    for name, model in pairs:
        if check_name(name) in seen:
            raise ValueError(f"the name {name!r} more than once: each model needs one of its own")
        seen.add(name)
        own = dict(facts.get(name, {}))
        if unknown := sorted(set(own) - set(vars(common))):
            raise ValueError(f"facts of {name!r} are tags, task, source and parent, not {', '.join(unknown)}")
        own["tags"] = (*common.tags, *check_tags(own.get("tags", ())))
        yield task_of(zoo, name, model, replace(common, **own), options, again)


def task_of(zoo: Zoo, name: str, model: Any, facts: Facts, options: Mapping[str, Any], again: bool) -> Task:
    """`again`: it is fingerprinted though a model of that name with the same weights may be there."""
    check_name(name)
    there = None if again else zoo.store.find(name)
    if facts.source is None and isinstance(model, NamedModel):
        facts = replace(facts, source=model.spec)
    elif facts.source is None and isinstance(model, (str, Path)) and not is_fingerprint_file(model):
        facts = replace(facts, source=str(model))
    known = None if there is None else there["digest"]
    return Task(name, model, zoo.settings, str(zoo.probe_path.absolute()), known, dict(options), facts)


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


def make(task: Task) -> Outcome:
    """The fingerprint; errors as they are."""
    model, options = task.model, dict(task.options)
    if isinstance(model, Fingerprint):
        return model
    if is_fingerprint_file(model):
        try:
            return Fingerprint.load(model)
        except OtherFile as error:
            error.add_note(f"a model's weights are named behind its architecture: ARCHITECTURE@{model}")
            raise
    if isinstance(model, (str, Path)) and str(model).endswith(".safetensors") and "@" not in str(model):
        raise FileNotFoundError(f"no file {model}")
    probe = task.probe
    if probe is None:
        if not Path(task.probe_path).is_file():
            return NO_PROBE
        probe = _probe(task.probe_path, task.settings.probe)
    if isinstance(model, (str, Path)):
        with _opening:
            model = open_model(str(model))
    if task.known is not None:
        module, name, prepare = with_name(model, options.get("prepare"))
        if isinstance(module, nn.Module) and Network(module, name, prepare=prepare).digest() == task.known:
            return UNCHANGED
    s = task.settings
    return fingerprint(model, probe, kinds=s.kinds, size=s.size, seed=s.seed, rows=s.rows, **options)


def attempt(task: Task | bytes) -> Outcome:
    """The fingerprint, or why there is none: an error's own class may not be known where it would go."""
    try:
        return make(pickle.loads(task) if isinstance(task, bytes) else task)  # our own bytes, see `_run`
    except Exception as error:
        return reason_of(error)


def reason_of(error: BaseException) -> str:
    """In one line and not too long."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = "; ".join(getattr(error, "__notes__", ()))
    text = " ".join(f"{type(error).__name__}: {text}{f' ({notes})' if notes else ''}".split())
    return text if len(text) <= 1000 else text[:997] + "…"


def is_fingerprint_file(model: Any) -> bool:
    """A .safetensors file without an architecture in front of it."""
    return isinstance(model, (str, Path)) and str(model).endswith(".safetensors") and Path(model).is_file()


@lru_cache(maxsize=2)
def _probe(path: str, digest: str) -> Probe:
    """Read once a worker."""
    return Probe.load(Path(path), digest)


def make_all(tasks: Iterable[Task], executor: Executor | None, workers: int) -> Iterator[tuple[Task, Outcome]]:
    """Each task with what became of it, in the order they end."""
    if executor is not None:
        yield from _elsewhere(iter(tasks), lambda _: nullcontext(executor), WINDOW, BROKEN)
    elif workers:
        fresh = get_context("spawn")  # not forked: threads of torch would hang in the child
        pool = partial(ProcessPoolExecutor, mp_context=fresh)
        yield from _elsewhere(iter(tasks), pool, workers, DIED_TWICE)
    else:
        for task in tasks:
            yield task, attempt(task)


def _elsewhere(
    tasks: Iterator[Task], pool: Callable[[int], AbstractContextManager[Executor]], workers: int, broken: str
) -> Iterator[tuple[Task, Outcome]]:
    """Where a worker died, those on their way are tried again one by one: so it is known whose fault it is."""
    while True:
        with pool(workers) as executor:
            suspects = yield from _run(executor, tasks, 2 * workers, broken)
        if not suspects:
            return
        while suspects:
            with pool(1) as executor:
                blamed: list[tuple[Task, str]] = []
                while suspects and not blamed:
                    blamed = yield from _run(executor, iter([suspects.pop(0)[0]]), 1, broken)
            yield from blamed


def _run(
    executor: Executor, tasks: Iterator[Task], window: int, broken: str
) -> Generator[tuple[Task, Outcome], None, list[tuple[Task, str]]]:
    """Send tasks a few at a time and hand back what comes, until the executor gives tasks up.

    Returns these with the reason: `broken` where the executor no longer works, else what a cluster says when the worker
    died. A cluster blames all tasks of that worker.
    """
    pending: dict[Future[Outcome], Task] = {}
    again: list[Task] = []  # with the inputs, for workers that cannot see the folder
    given_up: list[tuple[Task, str]] = []
    travels = not isinstance(executor, ThreadPoolExecutor)
    try:
        while True:
            while not given_up and len(pending) < window:
                if (task := again.pop() if again else next(tasks, None)) is None:
                    break
                if isinstance(task.model, Fingerprint):
                    yield task, task.model
                    continue
                try:
                    # As bytes: tensors that torch shares between processes are lost when a worker dies.
                    sent = pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL) if travels else task
                except Exception as error:  # whatever a class of somebody's raises when it is pickled
                    yield task, CANNOT_TRAVEL.format(reason_of(error))
                    continue
                try:
                    pending[executor.submit(attempt, sent)] = task
                except BrokenExecutor:
                    given_up.append((task, broken))
            if not pending:
                return given_up + [(task, broken) for task in again]
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                task = pending.pop(future)
                try:
                    outcome = future.result()
                except Exception as error:
                    given_up.append((task, broken if isinstance(error, BrokenExecutor) else reason_of(error)))
                    continue
                if outcome == NO_PROBE:
                    again.append(replace(task, probe=_probe(task.probe_path, task.settings.probe)))
                else:
                    yield task, outcome
    finally:
        for future in pending:
            future.cancel()


# A Dask cluster as an executor: what its workers make is written by the process that asked

PATIENCE = 30  # seconds to reach the scheduler


@contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The cluster whose scheduler is at an address such as tcp://host:8786, or in a scheduler file (.json).

    A task whose worker dies is given to another by the scheduler, up to `distributed.scheduler.allowed-failures`
    times (3 by default); then it is given up, and the model is recorded as failed.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ImportError("a Dask cluster needs Dask: pip install 'sosie[dask]'") from None
    where = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
    try:
        client = Client(**where, timeout=PATIENCE)
    except (OSError, ValueError) as error:  # nobody answers; no address
        raise OSError(f"no Dask scheduler at {address}: {error}") from error
    # Not pure: a task that is tried again is another one, not the one that failed, remembered.
    with client, client.get_executor(pure=False) as executor:
        yield executor
