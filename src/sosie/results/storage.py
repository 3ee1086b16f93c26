"""Results as versioned JSON that round-trips exactly; damaged files raise an error that says what is wrong."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np

from ..files import COUNT, OtherFile, check_schema, plain_json, read_json, reading, write_json
from .tables import as_frame

if TYPE_CHECKING:
    import pandas

VERSION = 2  # of the files of all results
Array = np.ndarray[Any, np.dtype[np.float64]]


class Result:
    """The base of everything that can be saved; the first class that names a format reads its files.

    A dataclass whose fields are plain data is written and read as they are declared; others say how.
    """

    format: ClassVar[str]
    readers: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        Result.readers.setdefault(cls.format, cls)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per value."""
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """`rows()` as a data frame."""
        return as_frame(self.rows())

    def as_json(self) -> dict[str, Any]:
        """The content of its file."""
        return plain_json(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Result:
        """The result in a file; DamagedFile or ValueError if its content is inconsistent."""
        check_schema(path, content, schema_of(cls))
        result: Result = rebuilt(cls, content)
        return result

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON that `sosie.load` reads back exactly."""
        return write_json(path, {"format": self.format, "version": VERSION, **self.as_json()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        result = load(path)
        if not isinstance(result, cls):
            raise OtherFile(f"{path} holds {type(result).__name__}, not {cls.__name__}")
        return result


def load(path: str | os.PathLike[str]) -> Result:
    """Read a file that `save` of any result wrote.

    The checksum in the file must fit. Set "hash" to null in a file that you edited by hand; files older than checksums
    are read as they are.
    """
    content = read_json(path, tuple(Result.readers), VERSION, "result")
    with reading(path):
        return Result.readers[content["format"]].from_json(content, path)


# Dataclasses of plain data in files: text, numbers, and tuples, dicts and dataclasses of those


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with a question mark if they have a default; {} for other types."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    return {f.name + "?" * (f.name in optional): hints[f.name] for f in fields(kind)}


def schema_of(kind: Any) -> Any:
    """The schema of a type, as `check_schema` takes it; a field with a default may be missing, as in older files."""
    if types := _types_of(kind):
        return {name: schema_of(inner) for name, inner in types.items()}
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        return [schema_of(inner[0])]
    if origin is Literal:
        return inner
    if origin is dict:
        return {} if inner[1] is Any else {str: schema_of(inner[1])}
    if type(None) in inner:
        return (schema_of(inner[0]), None)
    return {int: COUNT, float: (float, None)}.get(kind, kind)  # NaN is written as null


def rebuilt(kind: Any, content: Any) -> Any:
    """The value of a type, from what `asdict` and JSON made of it, which fits its schema."""
    if types := {name.rstrip("?"): inner for name, inner in _types_of(kind).items()}:
        return kind(**{name: rebuilt(inner, content[name]) for name, inner in types.items() if name in content})
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(rebuilt(inner[0], item) for item in content)
    if content is None:
        return math.nan if kind is float else None
    return rebuilt(inner[0], content) if type(None) in inner else content


def nested(array: Array) -> Any:
    """An array as lists, with None for NaN; Python writes the shortest decimals that read back exactly."""
    if array.ndim > 1:
        return [nested(row) for row in array]
    return [float(v) if math.isfinite(v) else None for v in array]


def array_of(lists: Any, shape: tuple[int, ...]) -> Array | None:
    """The array of this shape from the lists of `nested`; None stays None."""
    if lists is None:
        return None
    leaves = lists
    for _ in shape[1:]:
        leaves = [item for part in leaves for item in part]
    if not {type(leaf) for leaf in leaves} <= {float, int, type(None)}:
        raise TypeError("an array of values holds something that is not a number")
    array = np.array(lists, dtype=np.float64)  # null becomes NaN
    if array.shape != shape and array.size:
        raise ValueError(f"values of shape {array.shape}, the sites make it {shape}")
    return array.reshape(shape)
