"""Many small pieces of linear algebra at once, each on one core.

A factorisation of a few hundred columns gains nothing from several threads, and where other work keeps the cores busy
they wait for each other: a hundred times as long was measured. So small ones get one thread each, and many of them run
side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

S = TypeVar("S")
T = TypeVar("T")

MOST_WORKERS = 8  # each holds what it works on


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """NumPy's and SciPy's linear algebra on one core each time it is called; as before afterwards."""
    with _blas().limit(limits=1, user_api="blas"):
        yield


def side_by_side(function: Callable[[S], T], given: Iterable[S]) -> Iterator[T]:
    """`map(function, given)` in as many workers as torch may use threads, each of them on one core; in order."""
    threads = torch.get_num_threads()
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


def lock_of(instance: object) -> RLock:
    """An instance's own lock, for what is made of it once."""
    return instance.__dict__.setdefault("_lock", RLock())
