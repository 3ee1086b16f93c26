"""Answers as JSON that are kept until the zoo changes; the same question asked twice at once is worked on once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from ..files import plain_json

MOST_BYTES = 64 * 2**20
AT_ONCE = min(max(os.cpu_count() or 1, 2), 8)  # threads that work answers out: more only wait for each other
SLOW, PATIENCE = 0.5, 20  # what takes so many seconds to make is good for so many times as long, whatever changes
MOST_SLOW = 16  # of these answers
T = TypeVar("T")
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def as_json(found: Any) -> bytes:
    """Numbers that are not finite are null; in ASCII, since half a character in a name has no other form."""
    try:
        text = _ENCODER.encode(found)
    except ValueError:  # most answers have none that are not finite, and are not gone through twice
        text = _ENCODER.encode(plain_json(found))
    return text.encode()


def _size(question: tuple[Any, ...], answer: bytes) -> int:
    """A question may be longer than its answer: filters are whatever somebody sends."""
    return len(answer) + len(repr(question))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.monotonic()
    return work(), time.monotonic() - start


class AnswerCache:
    """The last answers, up to some bytes of them, each under the number of changes the zoo had when it was asked."""

    def __init__(self, changes: Callable[[], int], most_bytes: int = MOST_BYTES) -> None:
        self._changes, self._most = changes, most_bytes
        self._answers: OrderedDict[Any, bytes] = OrderedDict()
        self._bytes = 0
        self._busy: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()
        self._slow: dict[Any, tuple[float, bytes]] = {}  # until when, and the answer
        self._rooms: dict[bool, CapacityLimiter] = {}

    async def ask(
        self, question: tuple[Any, ...], make: Callable[[], Any], *, patient: bool = False, quick: bool = False
    ) -> bytes:
        """What is known is answered at once; the rest is worked out in a thread, of which there are few.

        `patient`: an answer that took long is given again for a while though the zoo has changed.
        `quick`: worked out right here, where a thread would cost more than the answer.
        """
        with self._lock:
            until, slow = self._slow.get(question, (0.0, b"")) if patient else (0.0, b"")
            if time.monotonic() < until:
                return slow
        known = self._known((self._changes(), *question))
        if known is not None:
            return known
        if quick:
            return self.answer(question, make)
        found, seconds = await self._in_thread(lambda: _timed(lambda: self.answer(question, make)), patient)
        if patient and seconds >= SLOW:
            with self._lock:
                self._slow.pop(question, None)
                self._slow[question] = time.monotonic() + PATIENCE * seconds, found
                while len(self._slow) > MOST_SLOW:
                    del self._slow[next(iter(self._slow))]
        return found

    async def work_out(self, make: Callable[[], Any]) -> bytes:
        """What is not worth keeping, such as a page of an answer that is kept; in one of the few threads."""
        return await self._in_thread(lambda: as_json(make()), False)

    async def _in_thread(self, work: Callable[[], T], patient: bool) -> T:
        if patient not in self._rooms:
            self._rooms[patient] = CapacityLimiter(1 if patient else AT_ONCE)  # the slow ones are not in others' way
        return await to_thread.run_sync(work, limiter=self._rooms[patient])

    def _known(self, key: Any) -> bytes | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def answer(self, question: tuple[Any, ...], make: Callable[[], Any]) -> bytes:
        # Read before the answer is made: what changes meanwhile makes the next one who asks work it out again.
        key = (self._changes(), *question)
        found = self._known(key)
        if found is not None:
            return found
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            found = self._known(key)
            if found is None:
                try:
                    found = as_json(make())
                    self._keep(key, found)
                finally:
                    with self._lock:
                        self._busy.pop(key, None)
        return found

    def _keep(self, key: Any, found: bytes) -> None:
        with self._lock:
            if key not in self._answers and _size(key, found) <= self._most // 4:
                self._answers[key] = found
                self._bytes += _size(key, found)
            while self._bytes > self._most:
                self._bytes -= _size(*self._answers.popitem(last=False))
