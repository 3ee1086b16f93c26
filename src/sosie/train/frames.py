"""A file of frames that only grows: whatever moment its writer is killed at, all frames but the last are whole."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..results import DamagedFile

MAGIC = b"sosieFRM"
_HEAD = struct.Struct("<8sqQI")  # magic, step, bytes of payload, its checksum; then a checksum of these
_CHECK = struct.Struct("<I")
HEAD = _HEAD.size + _CHECK.size


class Frame(NamedTuple):
    """Where a record lies in its file."""

    step: int
    start: int  # of the payload
    size: int
    checksum: int

    @property
    def begins(self) -> int:
        return self.start - HEAD

    @property
    def ends(self) -> int:
        return self.start + self.size


class Scanned(NamedTuple):
    """The whole frames of a file, where they end, and what was found after them."""

    frames: list[Frame]
    end: int
    torn: str | None


def framed(step: int, payload: bytes) -> bytes:
    """A payload with its head, to be written in one go."""
    head = _HEAD.pack(MAGIC, step, len(payload), zlib.crc32(payload))
    return head + _CHECK.pack(zlib.crc32(head)) + payload


def scan(path: Path) -> Scanned:
    """Find the frames by their heads; only the last one's payload is read.

    A last frame that ends early is what a kill leaves: it is left out. Anything else that is wrong is no interruption,
    and refused: a frame of full length with a wrong checksum, a head that is none, damage with whole frames after it.
    """
    frames: list[Frame] = []
    if not path.exists():
        return Scanned(frames, 0, None)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        place = 0
        while place < size:
            frame = _head_at(file, place)
            if frame is None or frame.ends > size:
                break
            if frames and frame.step <= frames[-1].step:
                raise DamagedFile(f"{path} is damaged: step {frame.step} comes after step {frames[-1].step}")
            frames.append(frame)
            place = frame.ends
        last_is_whole = not frames or _is_whole(file, frames[-1])
        doubtful = place if last_is_whole else frames[-1].begins  # the last frame may reach over others
        if doubtful < size and (later := _later_frame(file, doubtful + 1, size)) is not None:
            raise DamagedFile(
                f"{path} is damaged at byte {doubtful}: {_fault(_head_at(file, doubtful), size)}, and the frame of "
                f"step {later.step} after it is whole, so this is no interrupted run"
            )
        if not last_is_whole or (size - place >= HEAD and _head_at(file, place) is None):
            raise DamagedFile(
                f"{path} is damaged at byte {doubtful}: {_fault(_head_at(file, doubtful), size)}, and it is no record "
                f"that a kill cut off. Restore it from a copy, or cut the file there (truncate -s {doubtful}) to go on "
                "without what follows"
            )
    torn = None
    if place < size:
        after = f"after step {frames[-1].step}" if frames else "at the start"
        torn = f"{path.name}: {size - place} bytes of an unfinished record {after} were left out"
    return Scanned(frames, place, torn)


def _fault(frame: Frame | None, size: int) -> str:
    if frame is None:
        return "there is no head of a frame"
    if frame.ends > size:
        return f"its frame says that it has {frame.size} bytes, more than are left"
    return "its frame has a wrong checksum"


def _head_at(file: BinaryIO, place: int) -> Frame | None:
    file.seek(place)
    return _parsed(file.read(HEAD), place)


def _parsed(head: bytes, place: int) -> Frame | None:
    if len(head) < HEAD or head[: len(MAGIC)] != MAGIC:
        return None
    if _CHECK.unpack(head[_HEAD.size :])[0] != zlib.crc32(head[: _HEAD.size]):
        return None
    _, step, size, checksum = _HEAD.unpack(head[: _HEAD.size])
    return Frame(step, place + HEAD, size, checksum)


def _is_whole(file: BinaryIO, frame: Frame) -> bool:
    checksum, left = 0, frame.size
    file.seek(frame.start)
    while left:
        part = file.read(min(left, 2**20))
        checksum, left = zlib.crc32(part, checksum), left - len(part)
    return checksum == frame.checksum


def _later_frame(file: BinaryIO, place: int, size: int) -> Frame | None:
    """The next whole frame from a place on."""
    if size - place < HEAD:
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        while (place := whole.find(MAGIC, place)) >= 0:
            frame = _parsed(whole[place : place + HEAD], place)
            if (
                frame is not None
                and frame.ends <= size
                and zlib.crc32(whole[frame.start : frame.ends]) == frame.checksum
            ):
                return frame
            place += 1
    return None


class FrameWriter:
    """Appends frames; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(self._file, path)
            self.frames, self._end, self.torn = scan(path)
            if self.torn is not None:
                os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise

    def append(self, step: int, payload: bytes) -> None:
        content = memoryview(framed(step, payload))
        try:
            written = 0
            while written < len(content):  # a write of more than 2 GiB takes several
                written += os.write(self._file, content[written:])
        except BaseException:
            os.ftruncate(self._file, self._end)  # a full disk costs this record and no other
            raise
        self.frames.append(Frame(step, self._end + HEAD, len(payload), zlib.crc32(payload)))
        self._end += len(content)

    def drop_after(self, step: int) -> list[int]:
        """Take off the records of later steps, and say which they were."""
        later = [frame for frame in self.frames if frame.step > step]
        if later:
            os.ftruncate(self._file, later[0].begins)
            self.frames, self._end = self.frames[: -len(later)], later[0].begins
        return [frame.step for frame in later]

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        # One that was forgotten, in a notebook say, must not keep its folder locked.
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    @property
    def closed(self) -> bool:
        return self._file < 0


def _lock(file: int, path: Path) -> None:
    """Held until the file is closed, by a kill too."""
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BlockingIOError(f"{path.parent}: another recorder is writing here; close it, or name another") from error


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, read as they are asked for."""
    if not path.exists() or not path.stat().st_size:
        yield memoryview(b"")
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        view = memoryview(whole)
        try:
            yield view
        finally:
            view.release()
