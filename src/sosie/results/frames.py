"""Rows as a data frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def as_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> pandas.DataFrame:
    """A row a dict; `columns`: which, in this order, also of no rows."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install 'sosie[pandas]'; rows() works without") from error
    return pandas.DataFrame(list(rows), columns=None if columns is None else list(columns))
