"""The files that sosie writes: atomically, and with a checksum that is verified on reading.

JSON and safetensors have one writer and one reader each. Files of version 1 have no checksum: they are read as they
are, and saving again adds one. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


CHECKED = 2  # the first version of every format whose files have a checksum
JSON_HASH, TENSORS_HASH = "hash", "sosie-hash"  # the fields of the checksum
PIECE = 2**22  # bytes that are hashed at a time
FORGOTTEN = 86400.0  # seconds after which a temporary file of an unknown process is removed
_PART = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-[^.]*\.part(?:\.[^.]*)?")
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class DamagedFile(ValueError):
    """The file was not written by sosie, or is incomplete."""


class OtherFile(DamagedFile):
    """The file may be whole, but holds something else than was asked for."""


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors while content is decoded into a DamagedFile that names the file."""
    try:
        yield
    except DamagedFile as error:
        if str(path) in str(error):
            raise
        raise DamagedFile(f"{path}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error


def check_writable(path: str | os.PathLike[str] | None) -> None:
    """Raise if a file could not be written there: now, rather than after hours of work."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file inside it")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write {path}: {folder} is not a folder that can be written to")


def write_atomically(path: str | os.PathLike[str], content: str | bytes | Callable[[Path], None]) -> Path:
    """Write text, bytes, or what `content(temporary_path)` writes, then rename it over `path` or the target of a link.

    An interruption leaves the old file unchanged; the next write into the folder removes what a kill leaves behind.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file inside it")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a device or a pipe, which a file would replace")  # /dev/null, say
    target = path.resolve() if path.is_symlink() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_forgotten(target.parent)
    prefix = f".{target.name}.{_process_space()}-{os.getpid()}-"
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only the owner can read
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _remove_forgotten(folder: Path) -> None:
    """Remove temporary files of processes that have ended, and those of other machines that are a day old."""
    with contextlib.suppress(OSError):  # another process may remove them too, and they do no harm
        for entry in os.scandir(folder):
            name = _PART.fullmatch(entry.name)
            if name is None or not entry.is_file(follow_symlinks=False):
                continue
            local = name[1] == _process_space()
            if (local and _has_ended(int(name[2]))) or time.time() - entry.stat().st_mtime > FORGOTTEN:
                os.unlink(entry.path)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # of another user
        pass
    return False


@cache
def _process_space() -> str:
    """An identifier of the scope in which process numbers are unique: a boot of a machine, or a container."""
    try:
        where = Path("/proc/sys/kernel/random/boot_id").read_text("ascii") + os.readlink("/proc/self/ns/pid")
    except OSError:
        where = socket.gethostname()
    return hashlib.sha256(where.encode()).hexdigest()[:8]


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], *, indent: int | None = None) -> Path:
    """Write JSON, which holds "format" and "version", with its checksum."""
    plain = json.loads(json.dumps(content, allow_nan=False))
    whole = {**plain, JSON_HASH: json_hash(plain)}
    separators = (",", ":") if indent is None else None
    text = json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    return write_atomically(path, text + "\n")


def plain_json(value: Any) -> Any:
    """Values as JSON can hold them: arrays as lists, and None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_hash(content: Mapping[str, Any]) -> str:
    """The checksum of names and values, independent of layout; raises ValueError for numbers that are not finite."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: str | os.PathLike[str], form: str | Sequence[str], newest: int, what: str) -> dict[str, Any]:
    """Read a file of this format (or one of these), no newer than `newest`; raise DamagedFile if it is not whole."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        hint = "; the class that saved a .safetensors file loads it" if path.suffix == ".safetensors" else ""
        raise DamagedFile(f"{path} is not text, so not a saved {what}{hint}") from error
    except json.JSONDecodeError as error:
        raise DamagedFile(f"{path} is not whole JSON (line {error.lineno}: {error.msg}); was it cut off?") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise DamagedFile(f"{path} is damaged: {error}") from error
    except RecursionError as error:
        raise DamagedFile(f"{path} is nested too deeply to be a saved {what}") from error
    forms = (form,) if isinstance(form, str) else form
    if not isinstance(content, dict) or content.get("format") not in forms:
        raise OtherFile(f"{path} is JSON, but not a saved {what} (no format {forms[0]!r} in it)")
    version = content.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DamagedFile(f"{path} has no valid version number: {str(version)[:20]!r}")
    if version > newest:
        raise DamagedFile(
            f"{path} was written by a newer sosie (format {str(version)[:20]}, this one reads up to {newest}): upgrade"
        )
    checksum = content.pop(JSON_HASH, "" if version >= CHECKED else None)
    try:
        same = json_hash(content) == checksum
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: it has a number that is NaN or infinite") from error
    if checksum is not None and not same:
        raise DamagedFile(
            f"{path} is damaged: its checksum does not fit its content, which was changed after it was written. "
            f'Restore it or make it again; if you edited it by hand, set its "{JSON_HASH}" to null to have it read so'
        )
    return content


class Part(NamedTuple):
    """A tensor to be written: its safetensors type and shape, and its bytes in pieces."""

    name: str
    code: str
    shape: Sequence[int]
    size: int  # bytes
    pieces: Iterable[Any]


def write_tensors(
    path: str | os.PathLike[str], kind: str, version: int, tensors: Mapping[str, Tensor], text: Mapping[str, str]
) -> Path:
    """Write tensors and text as safetensors of the format "sosie-<kind>", for `read_tensors`."""
    head = {"format": f"sosie-{kind}", "version": str(version), **text}
    return write_atomically(path, lambda temporary: assemble(temporary, _parts(tensors), head))


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> Path:
    """Write a state dict as plain safetensors, with the checksum that sosie verifies."""
    return write_atomically(path, lambda temporary: assemble(temporary, _parts(tensors), {"format": "pt"}))


def _parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """The parts of a file, widest numbers first, so that all are aligned; views are written out."""
    parts = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        code = CODES.get(str(tensor.dtype).removeprefix("torch."))
        if code is None:
            raise TypeError(f"{name} is of type {tensor.dtype}, which safetensors does not have")
        parts.append(Part(name, code, tuple(tensor.shape), tensor.numel() * tensor.element_size(), _bytes(tensor)))
    return parts


def _bytes(tensor: Tensor) -> Iterator[Any]:
    import torch

    if tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def assemble(path: Path, parts: Iterable[Part], text: Mapping[str, str]) -> None:
    """Write safetensors piece by piece.

    The library would use a temporary file of its own, which a kill leaves behind, or build the file in memory.
    """
    parts = list(parts)
    end = 0
    places: dict[str, Any] = {}
    for part in parts:
        start, end = end, end + part.size
        places[part.name] = {"dtype": part.code, "shape": list(part.shape), "data_offsets": [start, end]}
    digest = hashlib.sha256(_head({"__metadata__": dict(text), **places}))
    blank = "0" * 2 * digest.digest_size  # replaced by the checksum at the end
    head = _head({"__metadata__": {TENSORS_HASH: blank, **text}, **places})
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in parts:
            for piece in part.pieces:
                digest.update(piece)
                file.write(piece)
        file.seek(8 + head.index(f'"{TENSORS_HASH}":"{blank}"'.encode()) + len(TENSORS_HASH) + 4)
        file.write(digest.hexdigest().encode())


def _head(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def read_tensors(
    path: str | os.PathLike[str], kind: str, version: int, what: str | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The text beside the tensors, and the tensors, on the CPU, of a file of the format "sosie-<kind>".

    `version`: the newest format that can be read; `what`: the kind, for messages.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            text = opened.metadata() or {}
            check_tensors(path, text, kind, version, what)
            return text, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{path} cannot be read as safetensors: {error}") from error


def check_tensors(
    path: str | os.PathLike[str], text: Mapping[str, str], kind: str, version: int, what: str | None = None
) -> None:
    """Raise unless a safetensors file with this metadata is a sosie file of this kind, with its checksum."""
    if text.get("format") != f"sosie-{kind}":
        raise OtherFile(f"{path} is a safetensors file, but not a sosie {what or kind} file")
    written = text.get("version")
    if written not in [str(known) for known in range(1, version + 1)]:
        raise DamagedFile(f"{path} was written by a newer sosie (format {str(written)[:20]}): upgrade sosie")
    if int(written) >= CHECKED and TENSORS_HASH not in text:
        raise DamagedFile(f"{path} is damaged: its checksum is missing. Restore it or make it again")
    check_hash(path, text)


def check_hash(path: str | os.PathLike[str], text: Mapping[str, str]) -> None:
    """Raise DamagedFile if the content of a safetensors file does not fit its checksum; do nothing if it has none."""
    if TENSORS_HASH not in text:
        return
    with open(path, "rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        del head["__metadata__"][TENSORS_HASH]
        digest = hashlib.sha256(_head(head))
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != text[TENSORS_HASH]:
        raise DamagedFile(
            f"{path} is damaged: its checksum does not fit its content, which was changed after it was written. "
            "Restore it or make it again"
        )


# Nested values in a safetensors file: tensors as they are, the rest as JSON beside them. Never unpickled

PLAIN = (type(None), bool, int, float, str)
_CLASSES: dict[str, type] = {}


def storable(*classes: type) -> None:
    """Register dataclasses that files may hold: no other class is made from a file."""
    _CLASSES.update({cls.__name__: cls for cls in classes})


def write_nested(path: str | os.PathLike[str], kind: str, version: int, about: Mapping[str, Any], value: Any) -> Path:
    """Write dicts, lists and tuples of tensors, numbers and text, atomically."""
    tensors: dict[str, Tensor] = {}
    layout = encode(value, "", tensors)
    text = {"about": json.dumps(about), "layout": json.dumps(layout, ensure_ascii=False)}
    return write_tensors(path, kind, version, tensors, text)


def read_nested(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Any], Any]:
    """The JSON about the value, and the value with its tensors on the CPU."""
    text, tensors = read_tensors(path, kind, version)
    with reading(path):
        about = json.loads(text["about"])
        if not isinstance(about, dict):
            raise TypeError('its "about" is not a JSON object')
        return about, decode(json.loads(text["layout"]), tensors)


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go into `tensors`, under names that begin with the key."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, np.ndarray):
        tensors[key] = torch.from_numpy(value)
        return {"array": key}
    if type(value) in _CLASSES.values():
        kept = [field.name for field in dataclasses.fields(value) if field.metadata.get("kept", True)]
        fields = {name: encode(getattr(value, name), _below(key, name), tensors) for name in kept}
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        # Pairs, since the keys of an optimiser are numbers, which JSON would turn into text.
        return {"dict": [[name, encode(item, _below(key, name), tensors)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, _below(key, k), tensors) for k, item in enumerate(value)]}
    if not isinstance(value, PLAIN):
        raise TypeError(
            f"{key or 'the value'} is a {type(value).__name__}, which cannot be saved: only tensors, numbers and text, "
            "or tuples, lists and dicts of them, can"
        )
    return {"value": value}


def _below(key: str, name: Any) -> str:
    if not isinstance(name, (str, int)):
        raise TypeError(f"{key} has a key {name!r}, which cannot be saved: only text and whole numbers can be keys")
    return f"{key}/{name}" if key else str(name)


def decode(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The value from the JSON of `encode`."""
    kind, value = next(iter(content.items()))
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "class":
        return _CLASSES[value](**{name: decode(item, tensors) for name, item in content["fields"].items()})
    if kind == "dict":
        return {name: decode(item, tensors) for name, item in value}
    if kind in ("tuple", "list"):
        items = [decode(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "value":
        return value
    raise ValueError(f"values of kind {str(kind)[:40]!r}")


# Schemas: the reader of every format declares one, and trusts content that fits it


def check_schema(path: str | os.PathLike[str], content: Any, schema: Any) -> None:
    """Raise DamagedFile, with the place, if JSON content does not fit a schema.

    A schema is a type (`int` excludes bool, `float` includes whole numbers), None, a literal text, `COUNT` for a whole
    number of at least 0, a tuple of alternatives, `[schema]` for a list, `{str: schema}` for an object with any names,
    or `{"name": schema, "other?": schema}` for an object with these names, optional if they end in a question mark.
    """
    if wrong := _mismatch(content, schema, ""):
        raise DamagedFile(f"{path} is damaged: {wrong}")


def _mismatch(value: Any, schema: Any, place: str) -> str | None:
    if isinstance(schema, tuple):
        if all(isinstance(alternative, str) for alternative in schema):
            return None if value in schema else _wrong(value, " or ".join(map(repr, schema)), place)
        mismatches = [_mismatch(value, alternative, place) for alternative in schema]
        return None if None in mismatches else mismatches[0]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return _wrong(value, "a list", place)
        return next((w for k, item in enumerate(value) if (w := _mismatch(item, schema[0], f"{place}[{k}]"))), None)
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return _wrong(value, "an object", place)
        if str in schema:
            fields = dict.fromkeys(value, schema[str])
        else:
            if missing := [name for name in schema if not name.endswith("?") and name not in value]:
                return f"{place or 'it'} has no {missing[0]!r}"
            fields = {name.removesuffix("?"): inner for name, inner in schema.items()}
        below = ((name, f"{place}.{name}" if place else name) for name in fields if name in value)
        return next((w for name, inner in below if (w := _mismatch(value[name], fields[name], inner))), None)
    if schema is None or isinstance(schema, str):
        return None if value == schema else _wrong(value, json.dumps(schema), place)
    if schema is COUNT and isinstance(value, int) and value < 0:
        return _wrong(value, "at least 0", place)
    schema = int if schema is COUNT else schema
    right = isinstance(value, (int, float) if schema is float else schema)
    if isinstance(value, bool) and schema is not bool:
        right = False
    return None if right else _wrong(value, _WORDS[schema], place)


COUNT = object()  # in a schema: a whole number of at least 0
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _wrong(value: Any, wanted: str, place: str) -> str:
    return f"{place or 'its content'} must be {wanted}, got {json.dumps(value)[:40]}"
