"""Results as versioned JSON that round-trips exactly; damaged files raise an error that says what is wrong."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..files import OtherFile, read_json, reading, write_json
from .tables import as_frame

if TYPE_CHECKING:
    import pandas

VERSION = 2  # of the files of all results
Array = np.ndarray[Any, np.dtype[np.float64]]


class Result:
    """The base of everything that can be saved; the first class that names a format reads its files."""

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
        raise NotImplementedError

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Result:
        """The result in a file; DamagedFile or ValueError if its content is inconsistent."""
        raise NotImplementedError

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
