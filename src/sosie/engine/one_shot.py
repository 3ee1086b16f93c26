"""One measure on two arrays of rows."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import number_array
from ..checks import listed
from ..linalg import chain_products, near_one, total_squares, vanishes, with_room
from ..measures import Measure, Transform, aligner_of, find, fit_transform, load_all, snap_to_bounds
from ..process_state import products
from ..results import Side
from ..results.tables import html_table
from ..stats import (
    Atoms,
    LinearMaps,
    OutputSums,
    PairedRepetitions,
    Reader,
    Repetitions,
    Sample,
    Statistic,
    TensorPair,
    check_folds,
    grouped_folds,
    linear_maps,
    read_labels,
)
from .caveats import of_lost_directions, of_widths
from .evaluate import CONSTANT

SQUARES = 1e-140, 1e145  # the range of sums of squares whose squares float64 holds with all digits


class Facts(list[dict[str, Any]]):
    """The facts of measures, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        columns = ("name", "closer", "summary")
        return html_table(columns, [[row[name] for name in columns] for row in self], see="sosie measures")


def list_measures() -> list[dict[str, Any]]:
    """Return every measure with its facts: summary, range, direction, invariances, cost, paper, package.

    Those of installed packages that offer some under the entry point `sosie.measures` come last.
    """
    return Facts(measure.facts() for measure in load_all())


@products(one_core=True)
def measure(
    name: str | Measure,
    x: Any,
    y: Any,
    *,
    inputs: Any = None,
    labels: Any = None,
    kind: str = "auto",
    groups: Any = None,
    split: Any = None,
    repetitions: Any = None,
    **options: Any,
) -> float:
    """The value of a measure for two sets of paired rows, x (n, p) and y (n, q), NumPy or torch, in float64.

    `inputs`: the inputs of the networks, for measures that need them. Warns if there are too few rows for the width
    of one side.

    For measures of held-out rows (predictivity), `groups` (n,) keeps the rows of a group in one fold, or `split` (n,)
    is the fold of each row; `repetitions` (n, r, q) are the repeated recordings of which y is the mean.

    For measures of outputs, x and y are (n,) class numbers, (n, classes) logits or probabilities, or numbers
    (regression), and `labels` (n,) the right classes. `kind` is "logits", "probabilities", "labels" or "regression".
    "auto" reads whole numbers (n,) as labels, non-negative rows that sum to 1 as probabilities, other floating-point
    (n, classes) as logits and (n,) as regression; ambiguous outputs raise an error.

    For measures of weights, x and y are maps (d, p) and (d, q), with a row for each entry of the input, or lists of
    factors (d, p₁), (p₁, p₂), … to be multiplied; for measures of tensors, two tensors of one shape; for measures of
    atoms, the atoms (m, height, width) of one layer of two models that share its coefficients.

    For measures of noisy responses, x and y are repetitions (n, repeats, p) and (n, repeats, q), or pairs of means
    (n, p) and covariances (n, p, p).
    """
    chosen = _chosen(name, x, y, options, call="measure('linear_cka', x, y)")
    if not chosen.folds and (
        given := [name for name, each in zip(HELD_OUT, (groups, split, repetitions), strict=True) if each is not None]
    ):
        raise TypeError(f"{chosen.name} holds no rows out: it takes no {' and no '.join(given)}")
    if split is not None and (unused := [name for name in chosen.folds if name in chosen.options]):
        raise TypeError(f"split is the fold of each row already: leave {' and '.join(unused)} out")
    if chosen.reads_outputs:
        return _of_outputs(chosen, x, y, inputs, labels, kind)
    if labels is not None or kind != "auto":
        raise TypeError(f"{chosen.name} compares rows, not outputs: it takes no labels and no kind")
    if chosen.reads_weights:
        if inputs is not None:
            raise TypeError(f"{chosen.name} takes no inputs")
        return _of_weights(chosen, x, y)
    if chosen.reads_repetitions:
        if inputs is not None:
            raise TypeError(f"{chosen.name} takes no inputs")
        return _of_repetitions(chosen, x, y)
    if inputs is not None and "inputs" not in chosen.needs:
        raise TypeError(f"{chosen.name} takes no inputs")
    sample = _paired(x, y, any_scale="scale" in chosen.invariant)
    if inputs is not None:
        sample = Sample.of(sample.xs, sample.ys, inputs=_rows(inputs, "inputs", True)[0].to(sample.xs[0].device))
    if chosen.folds:
        sample = replace(
            sample, split=_split(groups, split, sample.n, chosen.folds), noise=_noise(repetitions, sample.ys[0])
        )
    with torch.no_grad():
        value = float(snap_to_bounds(chosen.from_sample(sample), chosen))
    if math.isnan(value):
        raise ValueError(f"{chosen.name} is undefined here: nothing of one side is left once it is centred")
    _warn(chosen, sample)
    return value


@products(one_core=True)
def align(name: str | Measure, x: Any, y: Any, **options: Any) -> Transform:
    """The alignment behind the value of a measure: fitted on paired rows x (n, p) and y (n, q), to use on others.

    Rotations (procrustes_distance and its relatives, shape_angle), canonical directions (mean_cca, svcca, pwcca),
    regressions, matched neurons and transport plans have one; `sosie measures` says which measures do ("aligned_by").
    `t.apply(x2)` aligns other rows; `t.score(x2, y2)` is the value of the measure for them under the same alignment,
    the held-out value; on x and y it is that of `sosie.measure`. `t.maps` holds the directions, pairs or plan,
    `t.save(path)` writes safetensors, and `sosie.engine.Transform.load(path)` reads them.
    """
    chosen = _chosen(name, x, y, options, call="align('procrustes_distance', x, y)")
    aligner_of(chosen)
    sample = _paired(x, y, any_scale=False)
    chosen.check_widths(sample.xs[0].shape[1], sample.ys[0].shape[1])
    with torch.no_grad():
        transform = fit_transform(chosen, sample)
    _warn(chosen, sample)
    return transform


def _chosen(name: str | Measure, x: Any, y: Any, options: dict[str, Any], call: str) -> Measure:
    if callable(name):
        name = find(name)  # raises for a plain function
    if not isinstance(name, (str, Measure)):
        where = next((f"{w} place" for w, v in (("second", x), ("third", y)) if isinstance(v, (str, Measure))), None)
        found = f"; it is in the {where}" if where else f", got {type(name).__name__} in its place"
        raise TypeError(f"the name of the measure comes first, {call}{found}")
    return find(name).using(**options) if options else find(name)


def _paired(x: Any, y: Any, *, any_scale: bool) -> Sample:
    """Paired rows that vary; see `_rows`."""
    (rows_x, squares_x), (rows_y, squares_y) = _rows(x, "x", any_scale), _rows(y, "y", any_scale)
    if len(rows_x) != len(rows_y):
        raise ValueError(f"need paired rows, got {len(rows_x)} and {len(rows_y)}")
    if len(rows_x) < 2:
        raise ValueError(f"need at least 2 rows to compare, got {len(rows_x)}")
    for label, rows, squares in (("x", rows_x, squares_x), ("y", rows_y, squares_y)):
        if not _varies(rows, squares):
            raise ValueError(f"{label} does not vary: all {len(rows)} rows are equal, so no similarity is defined")
    return Sample.of(rows_x, rows_y.to(rows_x.device))


HELD_OUT = ("groups", "split", "repetitions")  # arguments of measures of held-out rows


def _split(groups: Any, split: Any, n: int, folds: dict[str, int]) -> Tensor | None:
    """The fold of each row, if it does not follow from its number."""
    if split is not None:
        labels, fold = np.unique(read_labels(split, "split", n), return_inverse=True)
        fold = fold.reshape(-1)
        if len(labels) < 2:
            raise ValueError(f"split names the fold of each row, and needs at least 2 folds, got {len(labels)}")
        if groups is not None:
            names, group = np.unique(read_labels(groups, "groups", n), return_inverse=True)
            least, most = np.full(len(names), len(labels)), np.zeros(len(names), dtype=int)
            np.minimum.at(least, group.reshape(-1), fold)
            np.maximum.at(most, group.reshape(-1), fold)
            if len(several := names[least < most]):
                raise ValueError(
                    f"{len(several)} of {len(names)} groups are in more than one fold of split: {listed(several)}"
                )
    elif groups is not None:
        check_folds(**folds)
        fold = grouped_folds(read_labels(groups, "groups", n), **folds)
    else:
        return None
    return torch.from_numpy(fold)


def _noise(repetitions: Any, y: Tensor) -> Tensor | None:
    """(q,) The variance of the noise in y, which is the mean of its repetitions (n, r, q)."""
    if repetitions is None:
        return None
    values, _ = _real_numbers(repetitions, "repetitions")
    if values.ndim != 3 or values.shape[1] < 2 or (len(values), values.shape[2]) != y.shape:
        raise ValueError(
            f"repetitions of y {tuple(y.shape)} must be (n, r, q), with r at least 2, got {tuple(values.shape)}"
        )
    values = values.to(y)
    if not torch.allclose(values.mean(1), y, rtol=1e-4, atol=1e-4 * float(y.std(0).max())):
        raise ValueError("y must be the mean of its repetitions: repetitions.mean(1), row by row; these do not pair")
    return values.var(1).mean(0) / values.shape[1]


def _warn(chosen: Measure, sample: Sample) -> None:
    sides = [Side(label, (label,), widths, ((),)) for label, widths in zip("xy", sample.widths, strict=True)]
    warn_of_rows(chosen, sample, *sides, stacklevel=5)  # past what `products` puts around the caller


def warn_of_rows(chosen: Measure, statistic: Statistic, side_a: Side, side_b: Side, *, stacklevel: int) -> None:
    """Warn of too few rows for the width of a side, and of directions that are lost."""
    found = (of_widths, of_lost_directions)
    caveats = [caveat for of in found for caveat in of(chosen, statistic, side_a, side_b)]
    if texts := dict.fromkeys(caveat.text for caveat in caveats):
        warnings.warn(f"{chosen.name}: {'; '.join(texts)}", stacklevel=stacklevel)


def _of_outputs(chosen: Measure, x: Any, y: Any, inputs: Any, labels: Any, kind: str) -> float:
    if inputs is not None:
        raise TypeError(f"{chosen.name} takes no inputs")
    if labels is not None and "labels" not in chosen.needs:
        raise TypeError(f"{chosen.name} takes no labels")
    outputs_x, outputs_y = as_outputs(x, "x"), as_outputs(y, "y")
    a, b = Reader("x", kind).read(outputs_x), Reader("y", kind).read(outputs_y.to(outputs_x.device))
    if not len(a):
        raise ValueError("no outputs to compare: x is empty")
    with torch.no_grad():
        right = None if labels is None else as_outputs(labels, "labels")
        sums = OutputSums.join(a, b, right, only=chosen.reads)
        try:
            return float(snap_to_bounds(chosen.from_outputs(sums), chosen))
        except ValueError as error:
            raise ValueError(f"{chosen.name}: {error}") from error


def _of_repetitions(chosen: Measure, x: Any, y: Any) -> float:
    with torch.no_grad():
        sides = []
        for label, side in (("x", x), ("y", y)):
            parts = side if isinstance(side, tuple) and len(side) == 2 else (side,)
            numbers = [with_room(_real_numbers(part, label)[0], label) for part in parts]
            sides.append(Repetitions.of(numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1]), label))
        return float(snap_to_bounds(chosen(PairedRepetitions(*sides)), chosen))


def as_outputs(values: Any, label: str) -> Tensor:
    """An array of outputs as a tensor of its own type: whole numbers stay whole."""
    if isinstance(values, Tensor):
        return values.detach()
    array = number_array(values, label)
    if array.dtype.kind == "c":
        raise TypeError(f"{label} must hold real numbers, got an array of {array.dtype}")
    if array.ndim == 0:
        raise ValueError(f"{label} must be (n,) or (n, …), got a single number")
    return _tensor(array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False))


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The array without a copy if possible: torch takes no reversed array, and warns about a read-only one."""
    plain = array.flags.writeable and all(step >= 0 for step in array.strides)
    return torch.from_numpy(array if plain else array.copy())


def _real_numbers(values: Any, label: str) -> tuple[Tensor, float]:
    """Finite real numbers in float64, and the sum of their squares."""
    if isinstance(values, Tensor):
        numbers = values.detach()
    else:
        array = number_array(values, label)
        numbers = _tensor(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False))
    if numbers.is_complex():
        raise TypeError(f"{label} is complex ({numbers.dtype}); compare real and imaginary parts as columns")
    numbers = numbers.double()
    total = float(total_squares(numbers))
    if not math.isfinite(total) and (bad := int((~torch.isfinite(numbers)).sum())):
        raise ValueError(f"{label} has {bad} values that are NaN or infinite")
    return numbers, total


def _rows(values: Any, label: str, any_scale: bool) -> tuple[Tensor, float]:
    """Rows in float64, and the sum of their squares; rescaled near 1 if the measure allows it and products need it."""
    values = values if isinstance(values, Tensor) else number_array(values, label)
    shape = tuple(values.shape)
    if len(shape) != 2:
        hint = "reshape(-1, 1)" if len(shape) == 1 else "flatten it to (rows, features)"
        raise ValueError(f"{label} must be (n, p), got shape {shape}: {hint}")
    if shape[1] == 0:
        raise ValueError(f"{label} has no columns: shape {shape}")
    rows, total = _real_numbers(values, label)
    if not SQUARES[0] <= total <= SQUARES[1] and bool(rows.any()):
        if any_scale:
            rows = near_one(rows)
            return rows, float(total_squares(rows))
        raise ValueError(
            f"the largest number in {label} is {float(rows.abs().max()):.0e}: products of four such leave what float64 "
            f"holds; divide {label} by that"
        )
    return rows, total


def _varies(rows: Tensor, squares: float) -> bool:
    """Whether rows differ by more than rounding, from the rows and the sum of their squares."""
    # Σ‖x − mean‖² is at least half of any squared distance, which decides for all but nearly equal rows.
    apart = (rows[: len(rows) // 2 + 1 : len(rows) // 2] - rows[-1]).square().sum(1).max()
    if bool(apart / 2 > CONSTANT["float64"] * squares):
        return True
    return bool(Sample.of(rows, rows).spread[0][0] > CONSTANT["float64"])


# Measures of weights


def _of_weights(chosen: Measure, x: Any, y: Any) -> float:
    """The value for two maps, two tensors or the atoms of two models; see `measure`."""
    with torch.no_grad():
        if issubclass(chosen.reads, LinearMaps):
            a, b = _map(x, "x"), _map(y, "y")
            view = linear_maps(a, b.to(a.device), chosen.reads)
            for label, size, matrix in (("x", view.xx, a), ("y", view.yy, b)):
                if vanishes(float(size.sqrt()), float(matrix.square().sum() / matrix.abs().max() ** 2)):
                    raise ValueError(f"{label} is the same for all {len(matrix)} inputs: nothing is left to compare")
            return float(snap_to_bounds(chosen(view), chosen))
        a, b = _real_numbers(x, "x")[0], _real_numbers(y, "y")[0]
        if chosen.reads is Atoms:
            return float(snap_to_bounds(chosen(_atoms(chosen, a, b)), chosen))
        if a.shape != b.shape:
            raise ValueError(f"{chosen.name} compares tensors of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
        if "scale" in chosen.invariant:
            a, b = near_one(a), near_one(b)
        else:
            a, b = near_one(torch.stack([a, b.to(a.device)]))  # both by the same factor
        value = float(snap_to_bounds(chosen(TensorPair(a, b.to(a.device))), chosen))
    if math.isnan(value):
        raise ValueError(f"{chosen.name} is undefined here: one of the tensors is zero")
    return value


def _atoms(chosen: Measure, a: Tensor, b: Tensor) -> Atoms:
    for label, side in (("x", a), ("y", b)):
        if side.ndim not in (2, 3) or not side.numel():
            shape = tuple(side.shape)
            raise ValueError(f"{label}: atoms are (number, height, width) or (number, entries), got {shape}")
    if a.shape != b.shape:
        raise ValueError(f"{chosen.name} needs equally many atoms of one size, got {tuple(a.shape)}, {tuple(b.shape)}")
    return Atoms(a.flatten(1)[None], b.to(a.device).flatten(1)[None])


def _map(values: Any, label: str) -> Tensor:
    if not isinstance(values, (list, tuple)) or (values and np.ndim(values[0]) < 2):
        values = [values]
    if not values:
        raise ValueError(f"{label} has no factors")
    factors = [_real_numbers(factor, label)[0] for factor in values]
    for factor in factors:
        if factor.dim() != 2 or not factor.numel():
            raise ValueError(f"{label}: a map is (inputs, outputs), or a list of such: got {tuple(factor.shape)}")
    try:
        product = chain_products(factors)[-1]
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    if not bool(product.any()):
        raise ValueError(f"{label} is zero: no similarity is defined")
    return product
