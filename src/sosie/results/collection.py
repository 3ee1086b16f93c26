"""All pairs of several models, from one pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .comparison import Array, Comparison, Kind
from .summary import at_layers, mean_at_same_depth

Pair = tuple[int, int]


class LazyComparisons(Mapping[Pair, Comparison]):
    """Comparisons that are made when they are first read: many models have more pairs than anyone looks at."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        make: Callable[[int, int], Comparison],
        value: Callable[[int, int, str], Array] | None = None,
        whole: Callable[[str], Array | None] | None = None,
    ) -> None:
        """`value` gives the values of a pair at layers, where that is cheaper than the whole comparison.

        `whole` gives the model by model matrix of a measure at once, or None where it cannot.
        """
        self._made: dict[Pair, Comparison | None] = dict.fromkeys(pairs)
        self._make, self._value, self._whole = make, value, whole

    def __getitem__(self, pair: Pair) -> Comparison:
        comparison = self._made[pair]
        if comparison is None:
            comparison = self._made[pair] = self._make(*pair)
        return comparison

    def value(self, pair: Pair, measure: str) -> Array:
        """The values of a pair at layers alone."""
        if self._made[pair] is None and self._value is not None:
            return self._value(*pair, measure)
        return at_layers(self[pair], measure).value

    def whole(self, measure: str) -> Array | None:
        """The model by model matrix, where it can be computed at once."""
        return None if self._whole is None else self._whole(measure)

    def __contains__(self, pair: object) -> bool:
        return pair in self._made

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True, eq=False)
class Comparisons:
    """A `Comparison` for each pair i < j of models: `found[0, 1]`, `found["a", "b"]`, or loop over it."""

    names: tuple[str, ...]
    pairs: Mapping[Pair, Comparison]

    @property
    def kind(self) -> Kind:
        """The kind that all pairs have in common."""
        return next(iter(self)).kind if self.pairs else "representations"

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Comparison]:
        return iter(self.pairs.values())

    def __getitem__(self, key: tuple[int | str, int | str]) -> Comparison:
        if not isinstance(key, tuple) or len(key) != 2:
            raise KeyError(f"ask for a pair of models, e.g. found[0, 1]; got {key!r}")
        i, j = (self._index(part) for part in key)
        if (i, j) not in self.pairs:
            raise KeyError(f"pairs are stored as i < j: {sorted(self.pairs)}; got {(i, j)}")
        return self.pairs[i, j]

    def _index(self, part: int | str) -> int:
        if isinstance(part, int):
            return part
        if part not in self.names:
            raise KeyError(f"no model named {part!r}; there are {', '.join(self.names)}")
        return self.names.index(part)

    def matrix(self, measure: str) -> Array:
        """Model by model: the mean over layers of the value at the same depth (symmetric; NaN where undefined)."""
        import numpy as np

        at_once = self.pairs.whole(measure) if isinstance(self.pairs, LazyComparisons) else None
        if at_once is not None:
            return at_once
        matrix = np.full((len(self.names), len(self.names)), np.nan)
        for i, j in self.pairs:
            mean = mean_at_same_depth(self._value((i, j), measure))
            matrix[i, j] = matrix[j, i] = np.nan if mean is None else mean
        if self.pairs and (same := next(iter(self.pairs.values()))[measure].same) is not None:
            np.fill_diagonal(matrix, same)
        return matrix

    def _value(self, pair: Pair, measure: str) -> Array:
        pairs = self.pairs
        if isinstance(pairs, LazyComparisons):
            return pairs.value(pair, measure)
        return at_layers(pairs[pair], measure).value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON that `sosie.load` reads back exactly."""
        from .storage import save

        return save(self, path)

    def __repr__(self) -> str:
        return f"<Comparisons of {', '.join(self.names)}: {len(self.pairs)} pairs>"
