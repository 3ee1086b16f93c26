"""State that all threads of a process share, borrowed and restored: models, random states, switches of torch."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Lock = TypeVar("Lock", bound=Any)


class SharedContext:
    """A context of the whole process: the first thread that needs it enters it, and the last one leaves it.

    Threads end in any order, so no thread alone can restore the state that it found.
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


class OperationMode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler, which takes a second.

    torch wraps a mode to keep the compiler out of it, and imports the compiler to do so. Where the compiler is loaded
    already, the mode has that wrapper.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(_beside_compiler(cls) if "torch._dynamo" in sys.modules else cls)  # type: ignore[arg-type]


@cache
def _beside_compiler(mode: type[OperationMode]) -> type[OperationMode]:
    """The same mode with torch's wrapper."""
    own = {"__torch_dispatch__": mode.__torch_dispatch__, "_should_skip_dynamo": classmethod(lambda cls: True)}
    return type(mode.__name__, (mode,), own)


@contextmanager
def switched(owner: Any, name: str, value: bool) -> Iterator[None]:
    """Set an attribute of torch, and restore it afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def forkable(lock: Lock, in_child: Callable[[], None] = lambda: None) -> Lock:
    """A lock that forks wait for: without that, a child may start with a lock that nobody will release."""

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
    parts: dict[int, object]  # by id, which is unique while they are kept here
    refusal: str | None

    def in_the_way(self) -> list[_Hold]:
        """The holds of other threads that share parts with this one."""
        others = [hold for hold in tuple(_HOLDS) if hold.thread != self.thread]
        return [hold for hold in others if not hold.parts.keys().isdisjoint(self.parts)]

    def is_stuck(self) -> bool:
        """Whether a thread that this one would wait for is waiting, directly or not, for this one."""
        awaited = {hold.thread for hold in self.in_the_way()}
        for _ in _WAITING:  # one step further each time
            awaited |= {hold.thread for waits in _WAITING if waits.thread in awaited for hold in waits.in_the_way()}
        return self.thread in awaited


_HOLDS: list[_Hold] = []
_WAITING: list[_Hold] = []


def _forget_other_threads() -> None:
    _HOLDS[:] = [hold for hold in _HOLDS if hold.thread == threading.get_ident()]
    _WAITING.clear()


_CHANGED = forkable(threading.Condition(), in_child=_forget_other_threads)


@contextmanager
def held(parts: Iterable[object], *, refusal: str | None = None) -> Iterator[None]:
    """Hold modules and parameters for this thread: other threads that need any of them wait until they are free.

    All are taken at once, so that two calls cannot each hold what the other needs; a thread may take them again. With
    a `refusal`, other threads do not wait but get a RuntimeError with this text, for holds that may take long.
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
            if hold in _HOLDS:  # not in a child process forked by another thread
                _HOLDS.remove(hold)
            _CHANGED.notify_all()


# Random numbers

# Parts of the names of threads that draw no random numbers: progress bars (rich, tqdm), torch's loaders and compiler,
# asyncio, and notebooks.
_DRAW_NOTHING = (
    "_RefreshThread", "TMonitor", "QueueFeederThread", "_pin_memory_loop", "_read_thread", "asyncio-waitpid", "IOPub",
    "Heartbeat", "Control", "HistorySavingThread", "_watch_pipe_fd",
)  # fmt: skip


@contextmanager
def kept_random_state(*, cuda: bool = False) -> Iterator[None]:
    """Restore the random states of torch (CPU, CUDA), NumPy's global generator and Python afterwards.

    Not while another thread lives, before or after: it would draw the same numbers again.
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
    """The random states, to be compared: they change when random numbers are drawn."""
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), *of_cuda)]
    _, keys, position, *_ = np.random.get_state()
    return [*of_torch, np.asarray(keys).tobytes(), position, random.getstate()]


@contextmanager
def other_random_state(number: int = 0) -> Iterator[None]:
    """Use other random numbers than those that would come next, by number; restore the states afterwards."""
    with kept_random_state():
        if _is_alone():
            seed = torch.initial_seed() % 2**31 + 1 + number
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed)
            random.seed(seed)
        yield


def _is_alone() -> bool:
    """Whether no other thread is alive that may draw random numbers."""
    return all(map(_draws_nothing, set(threading.enumerate()) - {threading.current_thread()}))


def _draws_nothing(thread: threading.Thread) -> bool:
    return any(part in f"{type(thread).__name__} {thread.name}" for part in _DRAW_NOTHING)


# Products


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast; none if autocast is off, which is quicker to ask than to enter."""
    if torch.compiler.is_compiling() or (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@contextmanager
def products(*, tf32: bool = False, one_core: bool = False) -> Iterator[None]:
    """Our own arithmetic: without autocast, and on a GPU with TF32 or full float32 products.

    Moments and sampled rows always use full float32: their parts must match to the last digit. `one_core` is for
    arithmetic by NumPy, with no forward pass inside.
    """
    cores = torch_on_one_core() if one_core else nullcontext()
    with without_autocast("cpu"), without_autocast("cuda"), matmul_precision("tf32" if tf32 else "ieee"), cores:
        yield


_THREADS: ContextVar[int | None] = ContextVar("sosie_threads_of_torch", default=None)


def threads_of_torch() -> int:
    """How many threads torch may use, outside of `torch_on_one_core`."""
    return _THREADS.get() or torch.get_num_threads()


@contextmanager
def torch_on_one_core() -> Iterator[None]:
    """Leave the other cores to NumPy inside the block.

    Threads of torch and of NumPy's BLAS keep their core for a while after each operation, so that the two wait for each
    other: on two cores a measure of 1,000 rows takes 2 to 10 times as long, and small ones up to 35 times.
    """
    before, threads = _THREADS.get(), torch.get_num_threads()  # numbers of this thread
    _THREADS.set(before or threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _THREADS.set(before)


@contextmanager
def torch_on_all_cores() -> Iterator[None]:
    """Inside `torch_on_one_core`, give torch its threads back for large products that NumPy has no part in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of_torch())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Matmul:
    """The precision of float32 products on a GPU: the highest that any thread has requested."""

    # Since torch 2.9 a word, of which "ieee" comes before "tf32"; until then whether TF32 is allowed.
    _has_words = hasattr(torch.backends.cuda.matmul, "fp32_precision")
    setting = "fp32_precision" if _has_words else "allow_tf32"
    values = {"ieee": "ieee", "tf32": "tf32"} if _has_words else {"ieee": False, "tf32": True}

    def __init__(self) -> None:
        self._lock = forkable(threading.RLock())
        self._requests: list[Any] = []

    @contextmanager
    def at(self, precision: str) -> Iterator[None]:
        matmul = torch.backends.cuda.matmul
        with self._lock:
            if not self._requests:
                self._before = getattr(matmul, self.setting)
            self._requests.append(self.values[precision])
            setattr(matmul, self.setting, min(self._requests))
        try:
            yield
        finally:
            with self._lock:
                self._requests.remove(self.values[precision])
                setattr(matmul, self.setting, min(self._requests, default=self._before))


_MATMUL = _Matmul()


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """A context for TF32 or full ("ieee") products of float32 on a GPU; without effect on a CPU."""
    return _MATMUL.at(precision) if torch.cuda.is_initialized() else nullcontext()


_CONVOLUTIONS = SharedContext(lambda: switched(torch.backends.cudnn, "allow_tf32", False))


@contextmanager
def full_precision() -> Iterator[None]:
    """Full float32 products of a model on a GPU too (TF32 keeps three digits)."""
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


attention_in_parts = SharedContext(_slow_path)  # the fused inference path of attention skips hooks, and nests tensors
