"""The folder of a recorded run: run.json describes it, and records holds a frame for each step."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..checks import listed, matching, nearest
from ..files import DamagedFile, check_schema, read_json, write_json

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None  # type: ignore[assignment]

# A file of frames that only grows: whenever its writer is killed, all frames but the last are whole

MAGIC = b"sosieFRM"
_HEAD = struct.Struct("<8sqQI")  # magic, step, bytes of payload, its checksum; then a checksum of these
_CHECK = struct.Struct("<I")
HEAD = _HEAD.size + _CHECK.size


class Frame(NamedTuple):
    """The place of a record in its file."""

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

    def is_whole(self, file: memoryview) -> bool:
        """Whether its payload is complete and matches the checksum."""
        return self.ends <= len(file) and zlib.crc32(file[self.start : self.ends]) == self.checksum


def framed(step: int, payload: bytes) -> bytes:
    """A payload with its head, to be written at once."""
    head = _HEAD.pack(MAGIC, step, len(payload), zlib.crc32(payload))
    return head + _CHECK.pack(zlib.crc32(head)) + payload


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, read on demand."""
    if not path.exists() or not path.stat().st_size:
        yield memoryview(b"")
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        view = memoryview(whole)
        try:
            yield view
        finally:
            view.release()


def scan(path: Path) -> tuple[list[Frame], int, str | None]:
    """The whole frames of a file by their heads, where they end, and a message about what was left out after them.

    Only the last payload is read. A last frame that ends early comes from a kill, and is left out. Any other damage
    raises: a frame of full length with a wrong checksum, a broken head, damage with whole frames after it.
    """
    frames: list[Frame] = []
    with mapped(path) as whole:
        size, place = len(whole), 0
        while (frame := _frame_at(whole, place)) is not None and frame.ends <= size:
            if frames and frame.step <= frames[-1].step:
                raise DamagedFile(f"{path} is damaged: step {frame.step} comes after step {frames[-1].step}")
            frames.append(frame)
            place = frame.ends
        last_is_whole = not frames or frames[-1].is_whole(whole)
        doubtful = place if last_is_whole else frames[-1].begins  # the last frame may cover others
        frame = _frame_at(whole, doubtful)
        if frame is None:
            fault = "there is no frame"
        elif frame.ends > size:
            fault = f"the frame has {frame.size} bytes, more than are left"
        else:
            fault = "the frame has a wrong checksum"
        if (later := _later_frame(whole, doubtful + 1)) is not None:
            raise DamagedFile(
                f"{path} is damaged at byte {doubtful}: {fault}, but the frame of step {later.step} after it is whole, "
                "so the run was not merely interrupted"
            )
        if not last_is_whole or (size - place >= HEAD and frame is None):
            raise DamagedFile(
                f"{path} is damaged at byte {doubtful}: {fault}, which a kill does not cause. Restore it from a copy, "
                f"or cut the file there (truncate -s {doubtful}) to continue without what follows"
            )
    torn = None
    if place < size:
        after = f"after step {frames[-1].step}" if frames else "at the start"
        torn = f"{path.name}: left out {size - place} bytes of an unfinished record {after}"
    return frames, place, torn


def _frame_at(whole: memoryview, place: int) -> Frame | None:
    """The frame whose head is at this place, if there is one."""
    head = bytes(whole[place : place + HEAD])
    if len(head) < HEAD or head[: len(MAGIC)] != MAGIC:
        return None
    if _CHECK.unpack(head[_HEAD.size :])[0] != zlib.crc32(head[: _HEAD.size]):
        return None
    _, step, size, checksum = _HEAD.unpack(head[: _HEAD.size])
    return Frame(step, place + HEAD, size, checksum)


def _later_frame(whole: memoryview, place: int) -> Frame | None:
    """The next whole frame from a place on."""
    if len(whole) - place < HEAD:
        return None
    assert isinstance(whole.obj, mmap.mmap)
    while (place := whole.obj.find(MAGIC, place)) >= 0:
        frame = _frame_at(whole, place)
        if frame is not None and frame.is_whole(whole):
            return frame
        place += 1
    return None


class FrameWriter:
    """Appends frames to a file; one writer at a time."""

    of_this_process: ClassVar[WeakValueDictionary[Path, FrameWriter]] = WeakValueDictionary()

    def __init__(self, path: Path, *, empty: bool = False) -> None:
        """`empty`: without the frames that are there; a writer of this process there is closed."""
        self.path = path
        if empty and (earlier := self.of_this_process.get(path.resolve())) is not None:
            earlier.close()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed, by a kill too
            if empty:
                os.ftruncate(self._file, 0)
            self.frames, self._end, self.torn = scan(path)
            if self.torn is not None:
                os.ftruncate(self._file, self._end)
        except BaseException as error:
            os.close(self._file)
            self._file = -1
            if isinstance(error, BlockingIOError):
                message = (
                    f"another recorder writes to {path.parent}: close it (recorder.close(), or a with block around it; "
                    "in a notebook it may be that of an earlier cell, whose run overwrite=True replaces), or name "
                    "another folder"
                )
                raise BlockingIOError(message) from error
            raise
        self.of_this_process[path.resolve()] = self

    def append(self, step: int, payload: bytes) -> None:
        content = memoryview(framed(step, payload))
        try:
            written = 0
            while written < len(content):  # a write of more than 2 GiB takes several
                written += os.write(self._file, content[written:])
        except BaseException:
            os.ftruncate(self._file, self._end)  # a full disk costs only this record
            raise
        self.frames.append(Frame(step, self._end + HEAD, len(payload), zlib.crc32(payload)))
        self._end += len(content)

    def drop_after(self, step: int) -> list[int]:
        """Remove the records of later steps; returns those steps."""
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
        # A writer that is not closed, for example in a notebook, must not keep its folder locked.
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    @property
    def closed(self) -> bool:
        return self._file < 0


# The description of a run, and its records

ABOUT, RECORDS = "run.json", "records"
FORMAT, VERSION = "sosie-run", 2
RECORDED = ("atoms", "weights", "activations")
SUMS = ".coefficients"  # beside atoms: sum and sum of squares of each layer's coefficients; no module has this name
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SCHEMA = {
    "what": str,
    "sites": [str],
    "shapes": [[int]],
    "dtype": str,
    "model": str,
    "parameters": {str: [int]},
    "rows": (str, None),
    "probe": ({"inputs": int, "digest": str}, None),
    "by_depth?": bool,
    "left_out?": {str: str},
    "run?": str,
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class About:
    """The description of a run; a recorder that continues it must agree."""

    what: str
    sites: tuple[str, ...]
    shapes: tuple[Shape, ...]  # of what is recorded at each site
    dtype: str  # F32, F64, F16, BF16
    model: str  # in words
    parameters: dict[str, Shape]
    rows: str | None = None  # the row rule of activations
    probe: dict[str, Any] | None = None  # number and digest of the inputs that gave the activations
    by_depth: bool = True  # whether sites are in order of depth; sites of weights alone may not be
    left_out: dict[str, str] = field(default_factory=dict)  # sites not named one by one that gave no rows, and why
    run: str = ""  # a random name, also in every record, by which they belong together; older runs have none

    def save(self, folder: Path) -> None:
        write_json(folder / ABOUT, {"format": FORMAT, "version": VERSION, **vars(self)}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> About | None:
        """Read run.json; None if there is none."""
        path = folder / ABOUT
        if not path.is_file():
            if (folder / RECORDS).exists():
                raise DamagedFile(f"{folder} has {RECORDS} but no {ABOUT}, without which they cannot be read")
            return None
        content = read_json(path, FORMAT, VERSION, "recorded run")
        check_schema(path, content, SCHEMA)
        fields = {key: content[key] for name in SCHEMA if (key := name.removesuffix("?")) in content}
        fields["sites"], fields["shapes"] = tuple(fields["sites"]), tuple(map(tuple, fields["shapes"]))
        fields["parameters"] = {name: tuple(shape) for name, shape in fields["parameters"].items()}
        about = cls(**fields)
        if about.what not in RECORDED or about.dtype not in DTYPES:
            raise DamagedFile(f"{path} is damaged: what {about.what!r}, dtype {about.dtype!r}")
        if not about.sites or len(set(about.sites)) != len(about.sites) or len(about.sites) != len(about.shapes):
            raise DamagedFile(f"{path} is damaged: {len(about.sites)} sites, {len(about.shapes)} shapes")
        if any(size < 0 for shape in (*about.shapes, *about.parameters.values()) for size in shape):
            raise DamagedFile(f"{path} is damaged: a shape has a size below 0")
        return about

    def layout(self) -> tuple[bytes, dict[str, tuple[int, Shape, torch.dtype]], int]:
        """The head of each record (as of safetensors), the place of each tensor in it, and the record's size."""
        tensors = [(site, shape, self.dtype) for site, shape in zip(self.sites, self.shapes, strict=True)]
        tensors += [(SUMS, (len(self.sites), 2), "F32")] if self.what == "atoms" else []
        entries: dict[str, Any] = {}
        end = 0
        for name, shape, code in tensors:
            start, end = end, end + math.prod(shape) * DTYPES[code].itemsize
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        metadata = {"__metadata__": {"run": self.run}} if self.run else {}
        text = json.dumps(entries | metadata, ensure_ascii=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        places = {
            name: (len(head) + entries[name]["data_offsets"][0], shape, DTYPES[code]) for name, shape, code in tensors
        }
        return head, places, len(head) + end

    def check_same(self, new: About, folder: Path) -> None:
        """Raise if a recorder would continue a run of something else; the error names what differs."""
        before, now = self._facts(), new._facts()
        if self.what != new.what:
            before, now = ({"it holds": about.what} for about in (self, new))
        faults = [
            f"{fact} {before.get(fact, 'missing')} there and {now.get(fact, 'missing')} here"
            for fact in {**before, **now}
            if before.get(fact) != now.get(fact)
        ]
        if not faults and self.sites != new.sites:
            faults.append(f"its sites are in another order: {listed(self.sites)}")
        if faults:
            raise ValueError(
                f"{folder} is a run of something else ({self.model}; here {new.model}): "
                f"{listed(faults, separator='; ')}. Name another folder, or replace that run with overwrite=True"
            )

    def _facts(self) -> dict[str, Any]:
        """What must stay the same from one recorder of a run to the next."""
        facts: dict[str, Any] = {"numbers are stored as": self.dtype, "rows are made by": self.rows}
        if self.probe is not None:
            facts["it was probed with"] = f"{self.probe['inputs']} inputs ({self.probe['digest'][:8]})"
        facts |= {f"site {site} is": shape for site, shape in zip(self.sites, self.shapes, strict=True)}
        return facts | {f"parameter {name} is": shape for name, shape in self.parameters.items()}


@dataclass(eq=False)
class Run:
    """A recorded run, read on demand."""

    folder: Path
    about: About
    frames: list[Frame]
    note: str | None  # a message about what an interruption lost

    def __post_init__(self) -> None:
        self._head, self._places, self._size = self.about.layout()
        self._checked: set[int] = set()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> list[int]:
        return [frame.step for frame in self.frames]

    @property
    def sites(self) -> tuple[str, ...]:
        return self.about.sites

    def shape(self, site: str) -> Shape:
        return self.about.shapes[self.sites.index(site)]

    def tensor(self, k: int, site: str) -> Tensor:
        """The tensor of a site in the k-th record."""
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
        """Raise unless a record is whole and laid out as run.json says."""
        if frame.size != self._size:
            fault = f"has {frame.size} bytes where {ABOUT} makes it {self._size}"
        elif not frame.is_whole(whole):
            fault = "is damaged (wrong checksum)"
        elif bytes(whole[frame.start : frame.start + len(self._head)]) != self._head:
            fault = f"is not laid out as {ABOUT} says, or of another run"
        else:
            return
        raise DamagedFile(f"{self.folder}: the record of step {frame.step} {fault}")

    def coefficient_sums(self) -> Tensor:
        """Sum and sum of squares of each layer's coefficients, (steps, layers, 2)."""
        return torch.stack([self.tensor(k, SUMS) for k in range(len(self.frames))])

    def coefficients_moved(self) -> list[str]:
        """The layers of atoms whose coefficients changed during the run."""
        sums = self.coefficient_sums()
        return [site for site, moved in zip(self.sites, differ(sums, sums[:1]), strict=True) if moved]


def differ(sums_a: Tensor, sums_b: Tensor) -> list[bool]:
    """For each layer, whether sums (steps, layers, 2) of its coefficients ever differ by more than rounding."""
    return (~torch.isclose(sums_a, sums_b, rtol=1e-5, atol=0)).any(2).any(0).tolist()


def is_run(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike)) and (Path(thing) / ABOUT).is_file()


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open a folder that a `Recorder` wrote. A record that a kill cut off is left out and reported in `note`."""
    folder = Path(folder)
    about = About.read(folder)
    if about is None:
        raise FileNotFoundError(f"{folder} is not a recorded run: it has no {ABOUT}")
    frames, _, torn = scan(folder / RECORDS)
    return Run(folder, about, frames, torn)


def choose_sites(
    known: Mapping[str, Any] | tuple[str, ...],
    sites: Any,
    word: str,
    modules: Mapping[str, nn.Module | None] | None = None,
) -> list[str]:
    """The known names that `sites` (names, globs, types of modules) select, in their known order; None: all."""
    if sites is None:
        return list(known)
    chosen: set[str] = set()
    for site in [sites] if isinstance(sites, (str, type)) else sites:
        if not isinstance(site, type):
            chosen.update(matching(known, str(site), f"no {word} is called"))
        elif fits := {name for name, module in (modules or {}).items() if isinstance(module, site)}:
            chosen |= fits
        else:
            raise ValueError(f"no {word} is a {site.__name__}")
    if not chosen:
        raise ValueError(f"an empty list of sites; leave sites out for every {word}")
    return [name for name in known if name in chosen]
