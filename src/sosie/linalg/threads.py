"""Many small pieces of linear algebra at once, each on one core.

A factorisation of a few hundred columns gains nothing from several threads, and where other work keeps the cores busy
they wait for each other: a hundred times as long was measured. So small ones get one thread each, and many of them run
side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

from ..process_state import Shared

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

S = TypeVar("S")
T = TypeVar("T")

MOST_WORKERS = 8  # each holds what it works on


@cache
def _blas() -> ThreadpoolController:
    import scipy.linalg  # noqa: F401 (has a BLAS of its own, which is told only if it is there when this looks)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def _one_each() -> Iterator[None]:
    limited = _blas().limit(limits=1, user_api="blas")  # without its `with`, which only the same thread can leave
    try:
        yield
    finally:
        limited.restore_original_limits()


_ONE_THREAD = Shared(_one_each)


def one_thread() -> AbstractContextManager[Any]:
    """NumPy's and SciPy's linear algebra on one core each time it is called; as before afterwards."""
    return _ONE_THREAD


def side_by_side(function: Callable[[S], T], given: Iterable[S]) -> Generator[T, None, None]:
    """`map(function, given)` in as many workers as torch may use threads, each of them on one core; in order."""
    threads = torch.get_num_threads()  # each thread has a number of its own, so each puts its own back
    workers = min(threads, MOST_WORKERS, os.cpu_count() or 1)
    if workers == 1:
        yield from map(function, given)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="sosie")
    torch.set_num_threads(1)
    try:
        with one_thread():
            yield from pool.map(_in_worker(function), given)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


def _in_worker(function: Callable[[S], T]) -> Callable[[S], T]:
    """Whether gradients are recorded is each thread's own matter."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call(given: S) -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(given)

    return call


class once(Generic[T]):
    """`functools.cached_property` that neither makes a value twice nor other instances wait, as Python 3.11's does."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> once[T] | T:
        if instance is None:
            return self
        with lock_of(instance):
            if self.name not in instance.__dict__:
                instance.__dict__[self.name] = self.make(instance)
        return instance.__dict__[self.name]


class OwnLock:
    """A reentrant lock that a copy or a pickle of its owner does not take along, but has anew."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()


def lock_of(instance: object) -> OwnLock:
    """An instance's own lock, for what is made of it once."""
    found: OwnLock = instance.__dict__.setdefault("_lock", OwnLock())
    return found
