"""Representational dissimilarity matrices: made, selected, averaged, compared, saved."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..capture import number_array, open_activations
from ..checks import listed, matching, nearest, one_of
from ..factory import import_library
from ..files import CHECKED, DamagedFile, check_schema, read_tensors, reading, write_tensors
from ..linalg import upper_triangle, with_room
from ..measures.dissimilarities import COMPARATORS, DISSIMILARITIES, KENDALL, kendall, to_length
from ..notebook import html_facts
from ..process_state import torch_on_one_core

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
ROOM = 1e-150, 1e150  # whose squares float64 holds
UNEVEN = 1e-6  # of the largest entry of a given matrix: more than this is no rounding
LABELLED = 30  # stimuli whose names fit an axis
KIND, VERSION = "rdms", CHECKED
_ABOUT = {"stimuli": [str], "names": [str], "dissimilarity": str}


@dataclass(frozen=True, eq=False, repr=False)
class RDMs:
    """Dissimilarities of all pairs of stimuli, for one or several subjects, models or layers."""

    values: Array  # (RDMs, n (n − 1) / 2): above the diagonal, row by row
    stimuli: tuple[str, ...] = ()  # empty: numbered from 0
    names: tuple[str, ...] = ()  # whom each RDM is of; empty: numbered from 0
    dissimilarity: str = ""  # what was measured, if it is known

    def __post_init__(self) -> None:
        values = np.array(_real(self.values, "values"), np.float64)
        if values.ndim != 2 or not len(values):
            raise ValueError(f"values must be (RDMs, pairs of stimuli), got shape {values.shape}")
        n = (1 + round((1 + 8 * values.shape[1]) ** 0.5)) // 2
        if n * (n - 1) // 2 != values.shape[1]:
            raise ValueError(f"{values.shape[1]} dissimilarities are not those of all pairs of any number of stimuli")
        if n < 3:
            raise ValueError(f"an RDM needs at least 3 stimuli, got {n}")
        values.setflags(write=False)
        for key, what, count in (("stimuli", "stimuli", n), ("names", "RDMs", len(values))):
            labels = tuple(map(str, getattr(self, key))) or tuple(map(str, range(count)))
            if len(labels) != count:
                raise ValueError(f"{len(labels)} names for {count} {what}")
            if twice := {label for label, times in Counter(labels).items() if times > 1}:
                raise ValueError(f"two {what} have the same name: {listed(sorted(twice))}")
            object.__setattr__(self, key, labels)
        if bad := [name for name, row in zip(self.names, values, strict=True) if not np.isfinite(row).all()]:
            raise ValueError(f"RDM {listed(bad)} has entries that are NaN or infinite: leave their stimuli out before")
        for name, largest in zip(self.names, np.abs(values).max(1), strict=True):
            if largest and not ROOM[0] <= largest <= ROOM[1]:
                raise ValueError(f"RDM {name} has dissimilarities up to {largest:.0e}: divide them by that")
        object.__setattr__(self, "values", values)

    @classmethod
    @torch_on_one_core()
    def of(
        cls,
        activations: Mapping[str, Any] | str | os.PathLike[str],
        dissimilarity: str = "correlation",
        *,
        stimuli: Iterable[str] = (),
        sites: Any = None,
        rows: str = "flatten",
    ) -> RDMs:
        """One RDM for each site of {name: array (n, …)} or a file of saved activations (.npz, .safetensors).

        The dissimilarities are those of the measure `rsa`: "correlation", "euclidean", "squared_euclidean", "cosine"
        and "mahalanobis". `rows` is the rule that makes one row of each stimulus, as in `compare`.
        """
        measured = DISSIMILARITIES[one_of(dissimilarity, "dissimilarity", DISSIMILARITIES)]
        file = open_activations(activations)
        found = []
        for site in file.select(sites):
            x = file.rows(site.label, 0, file.n, rule=rows).double()
            if len(x) != file.n:
                raise ValueError(
                    f"rows={rows!r} gives {len(x)} rows for {file.n} stimuli at {site.label!r}: use rows='mean', say"
                )
            if not bool(torch.isfinite(x).all()):
                raise ValueError(f"the activations of {site.label!r} are NaN or infinite in places")
            found.append(upper_triangle(measured(with_room(x, site.label))).cpu().numpy())
        return cls(np.stack(found), tuple(stimuli), tuple(s.label for s in file.select(sites)), dissimilarity)

    @classmethod
    def from_matrices(cls, matrices: Any, *, stimuli: Iterable[str] = (), names: Iterable[str] = ()) -> RDMs:
        """From given matrices, (n, n) or (RDMs, n, n), or {name: matrix}; symmetric, with zeros on the diagonal."""
        if isinstance(matrices, Mapping):
            names = tuple(matrices)
            sizes = {name: np.shape(matrix) for name, matrix in matrices.items()}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"matrices are of different stimuli: {sizes}")
            matrices = list(matrices.values())
        given = np.asarray(_real(matrices, "matrices"), np.float64)
        stack = given[None] if given.ndim == 2 else given
        if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not stack.size:
            raise ValueError(f"matrices must be square, (n, n) or (RDMs, n, n), got shape {given.shape}")
        labels = tuple(map(str, names)) or tuple(map(str, range(len(stack))))
        for name, square in zip(labels, stack, strict=False):
            largest = np.nanmax(np.abs(square), initial=0)
            faults = {"is not symmetric": square - square.T, "has a diagonal that is not 0": square.diagonal()}
            for what, fault in faults.items():
                if np.nanmax(np.abs(fault), initial=0) > UNEVEN * largest:
                    raise ValueError(f"the matrix of {name} {what}; similarities become dissimilarities by 1 − s")
        i, j = np.triu_indices(stack.shape[1], 1)
        return cls((stack[:, i, j] + stack[:, j, i]) / 2, tuple(stimuli), labels)

    @classmethod
    def join(cls, parts: Iterable[RDMs] | Mapping[str, RDMs]) -> RDMs:
        """The RDMs of several objects, all of the same stimuli, as one; {name: one RDM} names them anew."""
        if isinstance(parts, Mapping):
            if many := [name for name, part in parts.items() if len(part) > 1]:
                raise ValueError(f"{many[0]} holds {len(parts[many[0]])} RDMs, for one name: select one")
            parts = [replace(part, names=(name,)) for name, part in parts.items()]
        parts = list(parts)
        if not parts:
            raise ValueError("no RDMs to join")
        for part in parts[1:]:
            same_stimuli(parts[0], part)
        kinds = {part.dissimilarity for part in parts}
        return cls(
            np.concatenate([part.values for part in parts]),
            parts[0].stimuli,
            tuple(name for part in parts for name in part.names),
            kinds.pop() if len(kinds) == 1 else "",
        )

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[RDMs]:
        return (
            replace(self, values=row[None], names=(name,)) for name, row in zip(self.names, self.values, strict=True)
        )

    def __getitem__(self, names: str | Iterable[str]) -> RDMs:
        """The RDMs that names or globs select."""
        if isinstance(names, (int, slice)):
            raise TypeError(f"RDMs are selected by name, not by number: there are {listed(self.names)}")
        wanted = {
            name
            for each in ([names] if isinstance(names, str) else names)
            for name in matching(self.names, each, "no RDM is called")
        }
        kept = [k for k, name in enumerate(self.names) if name in wanted]
        return replace(self, values=self.values[kept], names=tuple(self.names[k] for k in kept))

    @property
    def matrices(self) -> Array:
        """(RDMs, n, n), symmetric, with zeros on the diagonal."""
        n = len(self.stimuli)
        i, j = np.triu_indices(n, 1)
        found = np.zeros((len(self), n, n))
        found[:, i, j] = found[:, j, i] = self.values
        return found

    def select(self, stimuli: Iterable[str]) -> RDMs:
        """The RDMs of these stimuli, in this order."""
        wanted = tuple(map(str, stimuli))
        place = {name: k for k, name in enumerate(self.stimuli)}
        if missing := [name for name in wanted if name not in place]:
            raise KeyError(f"no stimulus {missing[0]!r}{nearest(missing[0], place)}")
        if len(wanted) < 3:
            raise ValueError(f"an RDM needs at least 3 stimuli, got {len(wanted)}")
        order = np.array([place[name] for name in wanted])
        i, j = np.triu_indices(len(order), 1)
        return replace(self, values=self.matrices[:, order[i], order[j]], stimuli=wanted)

    def mean(self, name: str = "mean") -> RDMs:
        """One RDM: the mean dissimilarities."""
        return replace(self, values=self.values.mean(0, keepdims=True), names=(name,))

    def plot(self, names: str | Iterable[str] = "*") -> Figure:
        """A matplotlib figure with a heat map of each RDM, on a common scale; bright is far apart."""
        rdms = self[names]
        columns = min(len(rdms), 4)
        rows = -(-len(rdms) // columns)
        figure = new_figure(2.6 * columns + 1, 2.8 * rows)
        panels = figure.subplots(rows, columns, squeeze=False)
        low, high = min(0.0, float(rdms.values.min())), float(rdms.values.max())
        for axes in panels.flat[len(rdms) :]:
            axes.set_axis_off()
        for axes, name, square in zip(panels.flat, rdms.names, rdms.matrices, strict=False):
            image = axes.imshow(square, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
            axes.set_title(name, parse_math=False, fontsize=9)
            ticks = range(len(rdms.stimuli)) if len(rdms.stimuli) <= LABELLED else ()
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_ticks(list(ticks), [rdms.stimuli[k] for k in ticks], fontsize=6, parse_math=False)
            axes.tick_params(axis="x", rotation=90)
        figure.colorbar(image, ax=panels, fraction=0.04, label=rdms.dissimilarity.replace("_", " ") or "dissimilarity")
        return figure

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a .safetensors file, which `RDMs.load` reads."""
        about = {key: getattr(self, key) for key in _ABOUT}
        return write_tensors(
            path, KIND, VERSION, {"values": torch.from_numpy(self.values.copy())}, {"about": json.dumps(about)}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RDMs:
        """Read what `save` wrote."""
        text, tensors = read_tensors(path, KIND, VERSION, "RDMs")
        with reading(path):
            about = json.loads(text["about"])
            check_schema(path, about, _ABOUT)
            if set(tensors) != {"values"} or tensors["values"].dtype != torch.float64:
                raise DamagedFile(f"{path} is damaged: it must hold one tensor, values, of float64")
            return cls(tensors["values"].numpy(), **about)

    def __repr__(self) -> str:
        return f"<RDMs of {listed(self.names)}: {len(self.stimuli)} stimuli, {self.dissimilarity or 'given'}>"

    def _repr_html_(self) -> str:
        facts = {
            "RDMs": listed(self.names, 8),
            "stimuli": f"{len(self.stimuli)}: {listed(self.stimuli, 8)}",
            "dissimilarity": self.dissimilarity,
            "from … to": f"{self.values.min():.3g} … {self.values.max():.3g}",
        }
        return html_facts("RDMs", facts)


def _real(values: Any, label: str) -> Array:
    array = number_array(values, label)
    if array.dtype.kind == "c":
        raise TypeError(f"{label} must be real numbers, got an array of {array.dtype}")
    return array


@torch_on_one_core()
def compare_rdms(a: RDMs, b: RDMs, compare: str = "spearman") -> Array:
    """(len(a), len(b)): the similarity of each RDM of a with each of b.

    The comparators are those of the measure `rsa`: "spearman", "rho_a", "pearson", "kendall" (τ-a), "kendall_b" (τ-b),
    "cosine", "whitened_cosine" and "whitened_pearson".
    """
    same_stimuli(a, b)
    x, y = (torch.tensor(side.values) for side in (a, b))
    if comparator(compare) in KENDALL:
        return np.array([[float(kendall(compare, one, other)) for other in y] for one in x])
    x, y = (to_length(compare, COMPARATORS[compare](side, len(a.stimuli))) for side in (x, y))
    return (x @ y.T).numpy()


def same_stimuli(a: RDMs, b: RDMs) -> None:
    if a.stimuli == b.stimuli:
        return
    if set(a.stimuli) == set(b.stimuli):
        raise ValueError("the RDMs have the same stimuli in another order: use .select(other.stimuli)")
    only = [sorted(set(one.stimuli) - set(other.stimuli)) for one, other in ((a, b), (b, a))]
    raise ValueError(
        f"the RDMs are of different stimuli, {len(a.stimuli)} and {len(b.stimuli)}; only one side has "
        f"{listed(only[0] + only[1])}: select those that both have, with .select(…)"
    )


def comparator(name: str) -> str:
    return one_of(name, "compare", (*COMPARATORS, *KENDALL))


def new_figure(width: float, height: float) -> Any:
    """A figure outside pyplot's global state, which works without a display."""
    matplotlib = import_library("matplotlib.figure", "a plot", extra="plots")
    return matplotlib.Figure(figsize=(width, height), layout="constrained")
