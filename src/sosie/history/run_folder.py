"""What a recorder wrote, to be read again: run.json says what it is, records holds a frame for each step."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..capture import nearest
from ..files import DamagedFile, read_json, write_json

# A file of frames that only grows: whatever moment its writer is killed at, all frames but the last are whole

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


ABOUT, RECORDS = "run.json", "records"
FORMAT, VERSION = "sosie-run", 2
KINDS = ("atoms", "weights", "activations")
SUMS = ".coefficients"  # beside atoms: sum and sum of squares of each layer's coefficients; no module is called so
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class About:
    """What a run is a record of; a recorder that goes on with it must agree."""

    what: str
    sites: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of what is kept at each site
    dtype: str  # F32, F64, F16, BF16
    model: str  # in words
    parameters: dict[str, tuple[int, ...]]
    rows: str | None = None  # the row rule of activations
    probe: dict[str, Any] | None = None  # inputs and digest of what activations are of
    by_depth: bool = True  # whether sites are in order of depth; weights by name alone may not be
    left_out: dict[str, str] = field(default_factory=dict)  # sites not named one by one that gave no rows, and why

    def as_json(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return {"format": FORMAT, "version": VERSION, **found}

    def layout(self) -> tuple[bytes, int]:
        """The head of each record as safetensors has it, which is the same for all, and the bytes of the tensors."""
        places: dict[str, Any] = {}
        end = 0
        for name, shape, code in self.tensors():
            start, end = end, end + math.prod(shape) * DTYPES[code].itemsize
            places[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(places, ensure_ascii=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, end

    def tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and type of each tensor of a record, in order."""
        found = [(site, shape, self.dtype) for site, shape in zip(self.sites, self.shapes, strict=True)]
        return [*found, (SUMS, (len(self.sites), 2), "F32")] if self.what == "atoms" else found


@dataclass(eq=False)
class Run:
    """A recorded run, read piece by piece."""

    folder: Path
    about: About
    frames: list[Frame]
    note: str | None  # what an interruption cost, in words
    _checked: set[int] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._head, self._size = self.about.layout()
        self._places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        start = len(self._head)
        for name, shape, code in self.about.tensors():
            self._places[name] = start, shape, DTYPES[code]
            start += math.prod(shape) * DTYPES[code].itemsize

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> list[int]:
        return [frame.step for frame in self.frames]

    @property
    def sites(self) -> tuple[str, ...]:
        return self.about.sites

    def shape(self, site: str) -> tuple[int, ...]:
        return self.about.shapes[self.sites.index(site)]

    def tensor(self, k: int, site: str) -> Tensor:
        """What the k-th record holds of a site."""
        if site not in self._places:
            raise KeyError(f"no site {site!r} in {self.folder}{nearest(site, self.sites)}")
        frame, (start, shape, dtype) = self.frames[k], self._places[site]
        with mapped(self.folder / RECORDS) as whole:
            if k not in self._checked:
                self._check(frame, whole)
                self._checked.add(k)
            place = frame.start + start
            content = bytearray(whole[place : place + math.prod(shape) * dtype.itemsize])
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

    def _check(self, frame: Frame, whole: memoryview) -> None:
        """That a record is whole and laid out as run.json says, before anything in it is believed."""
        if frame.size != len(self._head) + self._size:
            fault = f"has {frame.size} bytes where {ABOUT} makes it {len(self._head) + self._size}"
        elif frame.ends > len(whole) or zlib.crc32(whole[frame.start : frame.ends]) != frame.checksum:
            fault = "is damaged (wrong checksum)"
        elif bytes(whole[frame.start : frame.start + len(self._head)]) != self._head:
            fault = f"is not laid out as {ABOUT} says"
        else:
            return
        raise DamagedFile(f"{self.folder}: the record of step {frame.step} {fault}")

    def coefficient_sums(self) -> Tensor:
        """(steps, layers, 2)"""
        return torch.stack([self.tensor(k, SUMS) for k in range(len(self.frames))])

    def coefficients_moved(self) -> list[str]:
        """Beside atoms: the layers whose coefficients changed on the way."""
        sums = self.coefficient_sums()
        return [site for site, moved in zip(self.sites, differ(sums, sums[:1]), strict=True) if moved]


def differ(one: Tensor, other: Tensor) -> list[bool]:
    """Of sums (steps, layers, 2): whether the coefficients of each layer are ever others; not NaN, not rounding."""
    return (~torch.isclose(one, other, rtol=1e-5, atol=0)).any(2).any(0).tolist()


def is_run(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike)) and (Path(thing) / ABOUT).is_file()


def open_run(folder: str | os.PathLike[str]) -> Run:
    """A folder that a `Recorder` wrote. A record that was cut off by a kill is left out, and `note` says so."""
    folder = Path(folder)
    about = read_about(folder)
    if about is None:
        raise FileNotFoundError(f"{folder} is no recorded run: it has no {ABOUT}")
    found: Scanned = scan(folder / RECORDS)
    return Run(folder, about, found.frames, found.torn)


def write_about(folder: Path, about: About) -> None:
    write_json(folder / ABOUT, about.as_json(), indent=1)


def read_about(folder: Path) -> About | None:
    """What run.json says; None where there is none."""
    path = folder / ABOUT
    if not path.is_file():
        if (folder / RECORDS).exists():
            raise DamagedFile(f"{folder} has {RECORDS} but no {ABOUT}: without it they cannot be read")
        return None
    found = read_json(path, FORMAT, VERSION, "recorded run")
    try:
        return _about(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _about(found: dict[str, Any]) -> About:
    sites, shapes = tuple(map(_text, found["sites"])), tuple(map(_shape, found["shapes"]))
    if found["what"] not in KINDS or found["dtype"] not in DTYPES:
        raise ValueError(f"what {found['what']!r}, dtype {found['dtype']!r}")
    if len(sites) != len(shapes) or len(set(sites)) != len(sites) or not sites:
        raise ValueError(f"{len(sites)} sites, {len(shapes)} shapes")
    parameters = {_text(name): _shape(shape) for name, shape in found["parameters"].items()}
    rows, probe, by_depth = found["rows"], found["probe"], found.get("by_depth", True)
    if not isinstance(by_depth, bool):
        raise TypeError(f"by_depth is {by_depth!r}")
    if probe is not None and not (isinstance(probe["inputs"], int) and isinstance(probe["digest"], str)):
        raise ValueError(f"probe {probe!r}")
    left_out = {_text(site): _text(why) for site, why in found.get("left_out", {}).items()}
    return About(
        found["what"], sites, shapes, found["dtype"], _text(found["model"]), parameters,
        None if rows is None else _text(rows), None if probe is None else dict(probe), by_depth, left_out,
    )  # fmt: skip


def check_same(old: About, new: About, folder: Path) -> None:
    """Refuse to go on with a run of something else; the error says of what."""
    faults = []
    if old.what != new.what:
        faults.append(f"it holds {old.what}, not {new.what}")
    then, now = (dict(zip(a.sites, a.shapes, strict=True)) for a in (old, new))
    faults += _differences("site", then, now) if old.what == new.what else []
    faults += _differences("parameter", old.parameters, new.parameters)
    if not faults and old.sites != new.sites:
        faults.append(f"its sites are in another order: {', '.join(old.sites[:4])}")
    for key, word in (("dtype", "numbers are stored as"), ("rows", "rows are made by")):
        if getattr(old, key) != getattr(new, key) and old.what == new.what:
            faults.append(f"{word} {getattr(old, key)} there, {getattr(new, key)} here")
    if old.probe != new.probe and old.what == new.what and old.probe is not None and new.probe is not None:
        faults.append(
            f"it was probed with {old.probe['inputs']} inputs ({old.probe['digest'][:8]}), not with these "
            f"{new.probe['inputs']} ({new.probe['digest'][:8]})"
        )
    if faults:
        raise ValueError(
            f"{folder} is a run of something else ({old.model}; here {new.model}): {'; '.join(faults)}. "
            "Name another folder"
        )


def _differences(word: str, then: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> list[str]:
    found = []
    for name in [*then, *(name for name in now if name not in then)]:
        if then.get(name) != now.get(name):
            was, is_now = (str(side[name]) if name in side else "missing" for side in (then, now))
            found.append(f"{word} {name} is {was} there and {is_now} here")
    return [*found[:3], *([f"and {len(found) - 3} more"] if len(found) > 3 else [])]


def chosen_sites(run: Run, sites: str | Sequence[str] | None) -> list[str]:
    """The recorded sites that names and globs ask for, in the order they are kept in."""
    if sites is None:
        return list(run.sites)
    wanted: set[str] = set()
    for asked in [sites] if isinstance(sites, str) else sites:
        found = {asked} & set(run.sites) or {site for site in run.sites if fnmatchcase(site, str(asked))}
        if not found:
            raise ValueError(f"no site {asked!r} was recorded in {run.folder}{nearest(str(asked), run.sites)}")
        wanted |= found
    if not wanted:
        raise ValueError("an empty list of sites; leave sites out for all that were recorded")
    return [site for site in run.sites if site in wanted]


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"expected text, got {found!r}")
    return found


def _shape(found: Any) -> tuple[int, ...]:
    sizes = tuple(found)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(f"no shape: {found!r}")
    return sizes
