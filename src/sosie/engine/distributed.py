"""One comparison in several processes: each reads its share of the chunks, and the first merges the statistics.

Short texts go through the store of torch.distributed, which can be read without waiting, so that each process learns
when another has failed. Statistics go through a gloo group on the CPU.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..capture import ALL, Chunk, Share

T = TypeVar("T")
LOOK = 1.0  # seconds between two looks at whether another process has failed
FIRST_NAP, LONGEST_NAP = 1e-4, 0.05  # seconds between two looks while waiting
_meetings = itertools.count()


class RankFailed(RuntimeError):
    """Another process of the comparison failed or did not join."""


class SingleProcess:
    """The only process, which waits for nobody."""

    share: Share = ALL

    @property
    def first(self) -> bool:
        return self.share.rank == 0

    @property
    def several(self) -> int | None:
        """The number of processes, if more than one."""
        return self.share.of if self.share.of > 1 else None

    def agree(self, facts: Callable[[], dict[str, str]], advice: str = "") -> None:
        """Raise, in every process, unless the facts of all are equal; `advice` for processes that do not share data."""

    def deal(self, chunks: Iterable[Chunk], learner: Any) -> Iterator[Chunk]:
        """This process's chunks; `learner` has `learnt()` and `learn()` for what the first chunk decides."""
        return iter(chunks)

    def collect(self, part: T, absorb: Callable[[T], None]) -> None:
        """In the first process, absorb the parts of the others, in their order."""

    def once(self, make: Callable[[], T]) -> T:
        """The result of `make` in the first process, for all processes."""
        return make()


class Distributed(SingleProcess):
    """One of several processes, all of which must make the same calls in the same order."""

    def __init__(self) -> None:
        self.share = Share(dist.get_rank(), dist.get_world_size())
        world: Any = dist.group.WORLD
        if not hasattr(world, "get_group_store"):
            raise RuntimeError(
                f"several processes cannot share a comparison with torch {torch.__version__}, which is too old: take a "
                "newer one, or compare in each process alone with sosie.engine.single_process()"
            )
        self._store: Any = world.get_group_store()
        self._limit: timedelta = self._store.timeout  # that of init_process_group
        self._name = f"sosie/{next(_meetings)}"
        self._steps = itertools.count()
        self._seen = 0  # inputs of the whole stream
        self._looked = time.monotonic()
        self._group: Any = None

    def agree(self, facts: Callable[[], dict[str, str]], advice: str = "") -> None:
        first, *others = map(json.loads, self._meet(json.dumps(facts())))
        for rank, other in enumerate(others, 1):
            for what, expected in first.items():
                if other.get(what) != expected:
                    _refuse(what, rank, expected, other.get(what), advice or SHARED)

    def deal(self, chunks: Iterable[Chunk], learner: Any) -> Iterator[Chunk]:
        """This process's chunks. The first chunk of the first process decides for all, as if one process read all."""
        taught = False

        def teach() -> None:
            nonlocal taught
            if not taught:
                learnt = self.once(learner.learnt)
                if not self.first:
                    learner.learn(learnt)
            taught = True

        for number, chunk in enumerate(chunks):
            self._seen = chunk.start + chunk.count
            if not self.share.has(number):
                continue
            if not self.first:
                teach()
            yield chunk
            teach()
            self._look()
        teach()

    def collect(self, part: T, absorb: Callable[[T], None]) -> None:
        first, *others = map(int, self._meet(str(self._seen)))
        for rank, seen in enumerate(others, 1):
            if seen != first:
                _refuse("the number of inputs", rank, str(first), str(seen))
        if not self.first:
            dist.send_object_list([part], dst=0, group=self._gloo())
            return
        for rank in range(1, self.share.of):
            received: list[Any] = [None]
            dist.recv_object_list(received, src=rank, group=self._gloo())
            absorb(received[0])

    def once(self, make: Callable[[], T]) -> T:
        made: list[Any] = [make() if self.first else None]
        self._meet("")
        dist.broadcast_object_list(made, src=0, group=self._gloo())
        return made[0]

    def fail(self, error: BaseException) -> None:
        """Tell the other processes, which will report the error and end."""
        if not isinstance(error, RankFailed):
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            with suppress(dist.DistError):
                self._store.set(f"{self._name}/failed", json.dumps([self.share.rank, reason]))

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _gloo(self) -> Any:
        """The group, made at a point that all processes have reached."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._limit)
        return self._group

    def _meet(self, text: str) -> list[str]:
        """The texts of all processes, once all have sent one; an error if a process failed or does not join."""
        step = f"{self._name}/{next(self._steps)}"
        keys = [f"{step}/{rank}" for rank in range(self.share.of)]
        nap, limit = FIRST_NAP, time.monotonic() + self._limit.total_seconds()
        with _lost_store():
            self._store.set(keys[self.share.rank], text)
            while not self._store.check(keys):
                self._look(now=True)
                if time.monotonic() > limit:
                    self._miss(keys)
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)
            return [self._store.get(key).decode() for key in keys]

    def _look(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        with _lost_store():
            if self._store.check([f"{self._name}/failed"]):
                rank, reason = json.loads(self._store.get(f"{self._name}/failed"))
                raise RankFailed(f"rank {rank} failed: {reason}")

    def _miss(self, keys: Sequence[str]) -> NoReturn:
        missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        raise RankFailed(
            f"rank {', '.join(missing)} did not join within {self._limit.total_seconds():g} s: every process "
            "of torch.distributed must make the same comparison. Use sosie.engine.single_process() to compare in one "
            "process, or init_process_group(timeout=…) for more time"
        )


_alone = ContextVar("alone", default=False)


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, comparisons do not share the work with other processes of torch.distributed."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


@contextmanager
def together() -> Iterator[SingleProcess]:
    """All processes of an initialised torch.distributed, or else this process alone."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if _alone.get() or not several:
        yield SingleProcess()
        return
    ranks = Distributed()
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        ranks.close()


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankFailed(
            "the store of torch.distributed is gone: the process that held it, mostly rank 0, has ended; see its error "
            "above"
        ) from error


SHARED = (
    "Pass the same models, and all of the data in the same order, in every process: no DistributedSampler and no "
    "shuffling, since sosie deals out the chunks"
)


def _refuse(what: str, rank: int, first: str, other: str | None, advice: str = SHARED) -> NoReturn:
    raise ValueError(
        f"the processes do not compare the same: {what} is {first} in rank 0 and {other} in rank {rank}. {advice}"
    )
