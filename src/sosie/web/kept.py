"""Answers as JSON that are kept until the zoo changes; the same question asked twice at once is worked on once."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MOST_BYTES = 64 * 2**20


def as_json(found: Any) -> bytes:
    """Numbers that are not finite are null."""
    return json.dumps(_plain(found), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    if isinstance(found, float) and not math.isfinite(found):
        return None
    return found


class Kept:
    """The last answers, up to some bytes of them, each under the number of changes the zoo had when it was asked."""

    def __init__(self, changes: Callable[[], int], most_bytes: int = MOST_BYTES) -> None:
        self._changes, self._most = changes, most_bytes
        self._answers: OrderedDict[Any, bytes] = OrderedDict()
        self._bytes = 0
        self._busy: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()

    def answer(self, question: tuple[Any, ...], make: Callable[[], Any]) -> bytes:
        # Read before the answer is made: what changes meanwhile makes the next one who asks work it out again.
        key = (self._changes(), *question)
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                found = self._answers.get(key)
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
            if key not in self._answers and len(found) <= self._most // 4:
                self._answers[key] = found
                self._bytes += len(found)
            while self._bytes > self._most:
                _, old = self._answers.popitem(last=False)
                self._bytes -= len(old)
