"""What all threads of a process share, borrowed and put back: models, random states, switches of torch."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

Lock = TypeVar("Lock", bound=Any)


class Shared:
    """A context of the whole process: the first thread that needs it enters it, the last one leaves it.

    Threads come and go in any order, so that none of them may put back what it found.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = forkable(threading.RLock())
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._opened = self._make()
                self._opened.__enter__()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._opened.__exit__(None, None, None)


@contextmanager
def switched(owner: Any, name: str, value: bool) -> Iterator[None]:
    """An attribute of torch's set to this; afterwards as before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def forkable(lock: Lock, in_child: Callable[[], None] = lambda: None) -> Lock:
    """The lock, which a fork waits for: else a child may start with one that nobody will release."""

    def after_in_child() -> None:
        in_child()
        lock.release()

    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=after_in_child)
    return lock


# Models


@dataclass(frozen=True, eq=False)
class _Hold:
    """Modules and parameters that one thread is changing or running."""

    thread: int
    parts: dict[int, object]  # by id, which is theirs as long as they are kept here
    refusal: str | None

    def in_the_way(self) -> list[_Hold]:
        """What other threads hold of these."""
        others = [one for one in tuple(_HOLDS) if one.thread != self.thread]
        return [one for one in others if not one.parts.keys().isdisjoint(self.parts)]

    def is_stuck(self) -> bool:
        """Whether a thread that this one would wait for waits, by way of others or not, for this one."""
        awaited = {one.thread for one in self.in_the_way()}
        for _ in _WAITING:  # each time one step further
            awaited |= {one.thread for each in _WAITING if each.thread in awaited for one in each.in_the_way()}
        return self.thread in awaited


_HOLDS: list[_Hold] = []
_WAITING: list[_Hold] = []


def _forget_other_threads() -> None:
    _HOLDS[:] = [hold for hold in _HOLDS if hold.thread == threading.get_ident()]
    _WAITING.clear()


_CHANGED = forkable(threading.Condition(), in_child=_forget_other_threads)


@contextmanager
def held(parts: Iterable[object], *, refusal: str | None = None) -> Iterator[None]:
    """These modules and parameters are this thread's: another one that wants any of them waits until they are free.

    All of them are taken at once, so that two calls cannot each have what the other needs; what a thread has it may
    take again. `refusal`: other threads do not wait but get a RuntimeError that says this, for what may take long.
    """
    hold = _Hold(threading.get_ident(), {id(part): part for part in parts}, refusal)
    with _CHANGED:
        while others := hold.in_the_way():
            if reason := next((other.refusal for other in others if other.refusal), None):
                raise RuntimeError(reason)
            if hold.is_stuck():
                raise RuntimeError(
                    "two threads each run a model that the other waits for: give all models to one call, or open them "
                    "in the same order in both threads"
                )
            _WAITING.append(hold)
            try:
                _CHANGED.wait()
            finally:
                _WAITING.remove(hold)
        _HOLDS.append(hold)
    try:
        yield
    finally:
        with _CHANGED:
            if hold in _HOLDS:  # not in a child that was forked by another thread
                _HOLDS.remove(hold)
            _CHANGED.notify_all()


# Random numbers

# Threads that draw no random numbers, by parts of their names: of progress bars (rich, tqdm), of torch's loaders and
# compiler, of asyncio, and of a notebook.
_DRAW_NOTHING = (
    "_RefreshThread", "TMonitor", "QueueFeederThread", "_pin_memory_loop", "_read_thread", "asyncio-waitpid", "IOPub",
    "Heartbeat", "Control", "HistorySavingThread", "_watch_pipe_fd",
)  # fmt: skip


@contextmanager
def kept_random_state(*, cuda: bool = False) -> Iterator[None]:
    """Afterwards the random states of torch (CPU, CUDA), NumPy's global generator and Python as before.

    But not where another thread lives, before or after: it would draw the same numbers again.
    """
    if not _is_alone():
        yield
        return
    of_cuda = torch.cuda.get_rng_state_all() if cuda or torch.cuda.is_initialized() else None
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if _is_alone():
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
            if of_cuda is not None:
                torch.cuda.set_rng_state_all(of_cuda)


def random_state() -> list[Any]:
    """The same states, to be compared: whether something has drawn random numbers meanwhile."""
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [each.numpy().tobytes() for each in (torch.get_rng_state(), *of_cuda)]
    _, keys, position, *_ = np.random.get_state()
    return [*of_torch, np.asarray(keys).tobytes(), position, random.getstate()]


@contextmanager
def other_random_state() -> Iterator[None]:
    """Random numbers that are not those which would come next; afterwards the states as before."""
    with kept_random_state():
        if _is_alone():
            seed = torch.initial_seed() % 2**31 + 1
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed)
            random.seed(seed)
        yield


def _is_alone() -> bool:
    """Whether no other thread lives that may draw random numbers."""
    return all(_draws_nothing(each) for each in threading.enumerate() if each is not threading.current_thread())


def _draws_nothing(thread: threading.Thread) -> bool:
    return any(part in f"{type(thread).__name__} {thread.name}" for part in _DRAW_NOTHING)


# Products


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """To enter the context takes longer than to ask whether there is a need to."""
    if torch.compiler.is_compiling() or (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@contextmanager
def products(*, tf32: bool = False) -> Iterator[None]:
    """Our own arithmetic: out of autocast, and on a GPU with TF32 or full float32 products; afterwards as before.

    Moments and sampled rows get float32 always: their parts must match to the last digit.
    """
    with without_autocast("cpu"), without_autocast("cuda"), matmul_precision("tf32" if tf32 else "ieee"):
        yield


class _Matmul:
    """How float32 matrices are multiplied on a GPU: of what several threads ask for, the most exact counts."""

    def __init__(self) -> None:
        self._lock = forkable(threading.RLock())
        self._asked: list[str] = []

    @contextmanager
    def at(self, precision: str) -> Iterator[None]:
        matmul = torch.backends.cuda.matmul
        with self._lock:
            if not self._asked:
                self._found = matmul.fp32_precision
            self._asked.append(precision)
            matmul.fp32_precision = min(self._asked)  # "ieee" comes before "tf32"
        try:
            yield
        finally:
            with self._lock:
                self._asked.remove(precision)
                matmul.fp32_precision = min(self._asked, default=self._found)


_MATMUL = _Matmul()


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """TF32 or full ("ieee") products of float32 on a GPU, afterwards as before; a CPU's are not touched."""
    return _MATMUL.at(precision) if torch.cuda.is_initialized() else nullcontext()


_CONVOLUTIONS = Shared(lambda: switched(torch.backends.cudnn, "allow_tf32", False))


@contextmanager
def full_precision() -> Iterator[None]:
    """A model's products in float32 with all their digits on a GPU too (TF32 keeps three); afterwards as before."""
    if not torch.cuda.is_available():
        yield
        return
    with _CONVOLUTIONS, _MATMUL.at("ieee"):
        yield


# Attention


@contextmanager
def _slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


attention_in_parts = Shared(_slow_path)  # attention's fused inference path passes hooks by, and nests tensors
