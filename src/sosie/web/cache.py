"""Answers as JSON, cached until the zoo changes; a question asked twice at once is answered once."""

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
AT_ONCE = min(max(os.cpu_count() or 1, 2), 8)  # threads that make answers: more would wait for each other
SLOW, PATIENCE = 0.5, 20  # an answer that took longer (in seconds) stays valid for this many times as long
MOST_SLOW = 16  # of these answers
T = TypeVar("T")
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def as_json(answer: Any) -> bytes:
    """Return JSON in ASCII, which also has a form for half a character; numbers that are not finite are null."""
    try:
        text = _ENCODER.encode(answer)
    except ValueError:  # rare, so most answers are read only once
        text = _ENCODER.encode(plain_json(answer))
    return text.encode()


def _size(question: tuple[Any, ...], answer: bytes) -> int:
    """Return bytes; a question may be longer than its answer, since anybody can send filters."""
    return len(answer) + len(repr(question))


class AnswerCache:
    """The last answers, up to a number of bytes, by question and the zoo's count of changes."""

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
        """Return a cached answer at once; make a new one in one of a few threads.

        `patient`: an answer that took long is given again for a while although the zoo has changed.
        `quick`: made without a thread, which would cost more than the answer.
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

        def timed() -> tuple[bytes, float]:
            start = time.monotonic()
            return self.answer(question, make), time.monotonic() - start

        answer, seconds = await self._in_thread(timed, patient)
        if patient and seconds >= SLOW:
            with self._lock:
                self._slow.pop(question, None)
                self._slow[question] = time.monotonic() + PATIENCE * seconds, answer
                while len(self._slow) > MOST_SLOW:
                    del self._slow[next(iter(self._slow))]
        return answer

    async def work_out(self, make: Callable[[], Any]) -> bytes:
        """Return an answer that is not cached, such as a page of a cached one, from one of the few threads."""
        return await self._in_thread(lambda: as_json(make()), False)

    async def _in_thread(self, work: Callable[[], T], patient: bool) -> T:
        if patient not in self._rooms:
            self._rooms[patient] = CapacityLimiter(1 if patient else AT_ONCE)  # slow ones do not block the others
        return await to_thread.run_sync(work, limiter=self._rooms[patient])

    def _known(self, key: Any) -> bytes | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def answer(self, question: tuple[Any, ...], make: Callable[[], Any]) -> bytes:
        # Read before the answer is made: after a change meanwhile, the next request makes a new answer.
        key = (self._changes(), *question)
        answer = self._known(key)
        if answer is not None:
            return answer
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            answer = self._known(key)
            if answer is None:
                try:
                    answer = as_json(make())
                    self._keep(key, answer)
                finally:
                    with self._lock:
                        self._busy.pop(key, None)
        return answer

    def _keep(self, key: Any, answer: bytes) -> None:
        with self._lock:
            if key not in self._answers and _size(key, answer) <= self._most // 4:
                self._answers[key] = answer
                self._bytes += _size(key, answer)
            while self._bytes > self._most:
                self._bytes -= _size(*self._answers.popitem(last=False))
