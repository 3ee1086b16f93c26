"""Fingerprints of many models: here, in processes of our own, or in any executor, whose workers may die.

Other processes only make fingerprints; the one that asked for them writes them.
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
from ..engine.provenance import digest_of_model
from ..files import OtherFile
from ..models import NamedModel, open_model, with_name
from .fingerprints import Fingerprint, Probe, Settings, fingerprint
from .store import Facts, check_name, check_tags

if TYPE_CHECKING:
    from .zoo import Zoo

OPTIONS = ("sites", "prepare", "device")  # of `fingerprint`, which may differ from model to model
WINDOW = 32  # twice as many tasks wait in an executor of the caller at one time
_opening = threading.Lock()  # models are built from the one global random state
UNCHANGED = "the same model is in the zoo: nothing to do"
DIED_TWICE = (
    "its worker process died twice: out of memory, or a crash below Python (a script that adds with workers= needs "
    '`if __name__ == "__main__":`)'
)
BROKEN = "the executor broke: one of its workers died. Add again with a fresh one: what was added stays"
CANNOT_TRAVEL = (
    "it cannot be sent to another process ({}): name it by a specification such as file.py:factory@weights, or use a "
    "ThreadPoolExecutor"
)
NO_PROBE = "the worker cannot see the folder of the zoo: it must be sent the inputs"
Outcome = Fingerprint | str  # the text says why there is none: UNCHANGED, NO_PROBE, or an error


@dataclass(frozen=True)
class Task:
    """A model to fingerprint, as it is sent to a worker."""

    name: str
    model: Any  # a module, a specification, a file with a fingerprint
    settings: Settings
    probe_path: str
    known: dict[str, Any] | None = None  # digest and facts of the model of that name in the zoo
    options: dict[str, Any] = field(default_factory=dict)  # sites, prepare, device
    facts: Facts = field(default_factory=Facts)
    probe: Probe | None = None  # for a worker that cannot see the folder


def tasks_of(
    zoo: Zoo,
    pairs: Iterable[tuple[str, Any]],
    common: Facts,
    facts: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    again: bool,
) -> Iterator[Task]:
    """Yield a task for each of several models: `facts` has the facts of each by name, beside the common ones."""
    if isinstance(pairs, ItemsView):  # all names are known, so a bad one is refused before any work
        for name, _ in pairs:
            check_name(name)
        if unknown := sorted({*facts} - {*dict(pairs)}):
            raise ValueError(f"facts of {unknown[0]!r}, but no model of that name is given")
    seen: set[str] = set()
    for name, model in pairs:
        if check_name(name) in seen:
            raise ValueError(f"the name {name!r} more than once: each model needs one of its own")
        seen.add(name)
        changes = dict(facts.get(name, {}))
        if unknown := sorted(set(changes) - set(vars(common))):
            raise ValueError(f"facts of {name!r} are tags, task, source and parent, not {', '.join(unknown)}")
        changes["tags"] = (*common.tags, *check_tags(changes.get("tags", ())))
        yield task_of(zoo, name, model, replace(common, **changes), options, again)


def task_of(zoo: Zoo, name: str, model: Any, facts: Facts, options: Mapping[str, Any], again: bool) -> Task:
    """Return the task of one model; with `again` it is fingerprinted even if the zoo has it with the same weights."""
    check_name(name)
    present = None if again else zoo.store.find(name, "digest, about")
    if facts.source is None and isinstance(model, (str, Path, NamedModel)) and not is_fingerprint_file(model):
        facts = replace(facts, source=model.spec if isinstance(model, NamedModel) else str(model))
    return Task(name, model, zoo.settings, str(zoo.probe_path.absolute()), present, dict(options), facts)


def default_name(model: Any) -> str:
    """Return the name of the weights file or folder of a specification, else its text without path separators."""
    if isinstance(model, NamedModel):
        return model.name
    if isinstance(model, (str, Path)):
        text = str(model)
        if text.startswith("hf:"):
            return Path(text.removeprefix("hf:")).name
        _, at, weights = text.rpartition("@")
        if (at and Path(weights).suffix) or is_fingerprint_file(text):
            return Path(weights if at else text).stem
        return re.sub(r"[/\\]+", "-", text).strip("-. ")
    raise ValueError(f"a {type(model).__name__} has no name: give name=")


def make(task: Task) -> Outcome:
    """Return the fingerprint, or UNCHANGED or NO_PROBE; errors pass."""
    model, options = task.model, dict(task.options)
    if isinstance(model, Fingerprint):
        return model
    if is_fingerprint_file(model):
        try:
            return Fingerprint.load(model)
        except OtherFile as error:
            error.add_note(f"to name weights of a model, write ARCHITECTURE@{model}")
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
        if isinstance(module, nn.Module) and _is_known(
            task.known, Network(module, name, options.get("sites"), prepare=prepare)
        ):
            return UNCHANGED
    s = task.settings
    return fingerprint(model, probe, kinds=s.kinds, size=s.size, seed=s.seed, rows=s.rows, **options)


def _is_known(known: Mapping[str, Any], network: Network) -> bool:
    """Return whether a model is that of the zoo, at the sites of the zoo if any are named."""
    about = known["about"]["about"]
    return (
        network.digest() == known["digest"]
        and about.get("modules", modules := digest_of_model(network.model)) == modules
        and (network.sites is None or about.get("sites") == repr(network.sites))
    )


def attempt(task: Task | bytes) -> Outcome:
    """Return the fingerprint or the reason why there is none: the caller may not know the class of an error."""
    try:
        return make(pickle.loads(task) if isinstance(task, bytes) else task)  # our own bytes, see `_run`
    except Exception as error:
        return reason_of(error)


def reason_of(error: BaseException) -> str:
    """Return an error as one line, not too long."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = "; ".join(getattr(error, "__notes__", ()))
    text = " ".join(f"{type(error).__name__}: {text}{f' ({notes})' if notes else ''}".split())
    return text if len(text) <= 1000 else text[:997] + "…"


def is_fingerprint_file(model: Any) -> bool:
    """Return whether this names a .safetensors file without an architecture."""
    return isinstance(model, (str, Path)) and str(model).endswith(".safetensors") and Path(model).is_file()


@lru_cache(maxsize=2)
def _probe(path: str, digest: str) -> Probe:
    """Read the probe set, once per worker."""
    return Probe.load(Path(path), digest)


def make_all(tasks: Iterable[Task], executor: Executor | None, workers: int) -> Iterator[tuple[Task, Outcome]]:
    """Yield each task with its outcome, in the order they end."""
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
    """Run tasks in a pool; if a worker dies, run the pending tasks again one by one, to find the one at fault."""
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
    """Send a few tasks at a time and yield the outcomes, until the executor gives tasks up.

    Return these with the reason: `broken` if the executor no longer works, else the error of a cluster whose worker
    died. A cluster blames all tasks of that worker.
    """
    pending: dict[Future[Outcome], Task] = {}
    again: list[Task] = []  # to send with the inputs, to workers that cannot see the folder
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
                    message = pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL) if travels else task
                except Exception as error:  # anything that pickling a foreign class raises
                    yield task, CANNOT_TRAVEL.format(reason_of(error))
                    continue
                try:
                    pending[executor.submit(attempt, message)] = task
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


# A Dask cluster as an executor

PATIENCE = 30  # seconds to reach the scheduler


@contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The cluster whose scheduler has an address such as tcp://host:8786, or is in a scheduler file (.json).

    The scheduler gives the task of a worker that died to another, up to `distributed.scheduler.allowed-failures` times
    (3 by default); then it gives up, and the model is recorded as failed.
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
    # Not pure: a task that is tried again must run again, not return the remembered failure.
    with client, client.get_executor(pure=False) as executor:
        yield executor
