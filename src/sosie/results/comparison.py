"""The result of a comparison: values, the rows they rest on, their uncertainty, and their provenance."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..checks import nearest
from ..files import check_schema
from ..notebook import figure, html_figures
from .storage import Array, Result, array_of, nested, rebuilt, schema_of
from .tables import number

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure

    from ..measures import Measure


Closer = Literal["up", "down"]
Kind = Literal["representations", "outputs", "shifts", "weights", "sketches", "stitching", "transfer"]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Pair = tuple[int, int]

FARTHEST = 1e100  # the largest bound; larger ones cannot be squared


@dataclass(frozen=True)
class Side:
    """One of the two things compared: its name and its sites in execution order."""

    name: str
    sites: tuple[str, ...]
    widths: tuple[int, ...]  # columns of each site's rows
    shapes: tuple[tuple[int, ...], ...]  # shape of one input's activation, before it became rows
    dtypes: tuple[str, ...] = ()  # of each site's activations; empty if unknown
    left_out: tuple[tuple[str, str], ...] = ()  # sites that were not named one by one and gave no rows, and why

    def __post_init__(self) -> None:
        if not len(self.sites) == len(self.widths) == len(self.shapes):
            raise ValueError(
                f"{self.name}: {len(self.sites)} sites, {len(self.widths)} widths, {len(self.shapes)} shapes"
            )
        if self.dtypes and len(self.dtypes) != len(self.sites):
            raise ValueError(f"{self.name}: {len(self.sites)} sites, {len(self.dtypes)} dtypes")

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Side:
        """A side from the content that `asdict` made of it."""
        side: Side = rebuilt(cls, content)
        return side


SIDE = schema_of(Side)


@dataclass(frozen=True)
class Caveat:
    """A warning about values: those of a site of A, of a site of B, of a pair, or (both None) all of them."""

    text: str
    site_a: str | None = None
    site_b: str | None = None
    undefined: bool = False  # whether this is the reason why there is no value

    def concerns(self, site_a: str, site_b: str) -> bool:
        return self.site_a in (None, site_a) and self.site_b in (None, site_b)


@dataclass(frozen=True)
class Number:
    """The facts of a value that is not a measure's, such as an accuracy, as a measure declares them."""

    closer: Closer
    bounds: tuple[float | None, float | None]
    same: float | None = None
    summary: str = ""
    paper: str = ""


Interval = tuple[Array | None, Array | None]


@dataclass(frozen=True)
class Chance:
    """The mean and spread of shuffled values, and how often they are as close as the value itself."""

    mean: Array
    spread: Array | None
    p: Array | None = None
    p_search: Array | None = None
    rows: int | None = None  # rows of the draws, if fewer than those of the value
    p_floor: float | None = None  # the smallest p that the draws can give


@dataclass(frozen=True)
class Estimate:
    """One measure's values over all pairs of sites, with the facts needed to read them."""

    value: Array  # (sites of A, sites of B); NaN where undefined, which a caveat explains
    n: int  # rows that the values rest on
    statistic: str  # that supplied them, in words
    closer: Closer
    bounds: tuple[float | None, float | None]
    same: float | None  # the value of a model compared with itself; None if that depends on the model
    low: Array | None = None
    high: Array | None = None
    null: Array | None = None  # the mean under shuffled pairing: chance
    null_spread: Array | None = None  # its standard deviation
    p: Array | None = None  # how often chance gives a value as close as this
    p_search: Array | None = None  # how often it gives one anywhere in the matrix
    block_error: Array | None = None  # of values from blocks of rows: how far the value from all rows may be (95 %)
    caveats: tuple[Caveat, ...] = ()
    p_floor: float | None = None  # the smallest p that the draws can give: 1 / (draws + 1)
    meaning: str = ""  # a sentence on what the number is: the first line of the measure's docstring
    paper: str = ""  # the keys of `sosie.papers.PAPERS` that the measure cites

    @classmethod
    def of(
        cls,
        facts: Measure | Number,
        value: Array,
        *,
        n: int,
        statistic: str,
        interval: Interval = (None, None),
        chance: Chance | None = None,
        block_error: Array | None = None,
        caveats: Iterable[Caveat] = (),
    ) -> Estimate:
        """Values with the facts of their measure; all numbers beside an undefined value become undefined too."""
        beside = {"low": interval[0], "high": interval[1], "block_error": block_error}
        if chance is not None:
            beside |= {"null": chance.mean, "null_spread": chance.spread, "p": chance.p, "p_search": chance.p_search}
        undefined = np.isnan(value)
        return cls(
            value=value,
            n=n,
            statistic=statistic,
            closer=facts.closer,
            bounds=facts.bounds,
            same=facts.same,
            caveats=tuple(caveats),
            p_floor=None if chance is None else chance.p_floor,
            meaning=facts.summary,
            paper=facts.paper,
            **{name: None if array is None else np.where(undefined, np.nan, array) for name, array in beside.items()},
        )

    def as_json(self, arrays: Iterable[str] = ()) -> dict[str, Any]:
        """JSON content with the arrays of these names, by default all of them."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ARRAYS}
        content["caveats"] = [asdict(caveat) for caveat in self.caveats]
        return content | {name: None if (a := getattr(self, name)) is None else nested(a) for name in arrays or ARRAYS}

    @classmethod
    def from_json(cls, content: dict[str, Any], shape: tuple[int, ...]) -> Estimate:
        """An estimate from content that fits the schema."""
        arrays = {name: array_of(content.get(name), shape) for name in ARRAYS}
        if arrays["value"] is None:
            raise ValueError("a measure without values")
        for name in ("p", "p_search"):
            if (array := arrays[name]) is not None and ((array < 0) | (array > 1)).any():
                raise ValueError(f"{name} lies between 0 and 1")
        low, high = content["bounds"]
        if any(bound is not None and abs(bound) > FARTHEST for bound in (low, high)):
            raise ValueError(f"no measure is bounded by {low} and {high}")
        if low is not None and high is not None and not low < high:
            raise ValueError(f"bounds go from {low} to {high}")
        estimate: Estimate = rebuilt(cls, content | arrays)
        return estimate

    @property
    def score(self) -> Array | None:
        """The calibrated values: 0 at chance, 1 for a model compared with itself; NaN where these are the same."""
        if self.null is None or self.same is None:
            return None
        extent = self.same - self.null
        return (self.value - self.null) / np.where(np.abs(extent) > SAME, extent, np.nan)


SAME = 1e-9  # differences that may be rounding

# The arrays of an estimate, all of one shape, which are checked as they are read
ARRAYS = ("value", "low", "high", "null", "null_spread", "p", "p_search", "block_error")
ESTIMATE = {name: schema for name, schema in schema_of(Estimate).items() if name.rstrip("?") not in ARRAYS}


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Every site of A compared with every site of B, for each measure."""

    format = "sosie-comparison"

    side_a: Side
    side_b: Side
    values: dict[str, Estimate]
    rows_rule: str = "flatten"
    provenance: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "representations"

    def __post_init__(self) -> None:
        shape = (len(self.side_a.sites), len(self.side_b.sites))
        for name, values in self.values.items():
            for kind in ARRAYS:
                array = getattr(values, kind)
                if array is not None and array.shape != shape:
                    raise ValueError(f"{name}: {kind} has shape {array.shape}, the sites make it {shape}")

    @property
    def sites_a(self) -> list[str]:
        return list(self.side_a.sites)

    @property
    def sites_b(self) -> list[str]:
        return list(self.side_b.sites)

    @property
    def measures(self) -> list[str]:
        return list(self.values)

    def __getitem__(self, measure: str) -> Estimate:
        if measure not in self.values:
            raise KeyError(f"no values for {measure!r}{nearest(measure, self.values)}")
        return self.values[measure]

    def only(self, measure: str | None) -> str:
        """Check that a measure has values, and return its name; None means the only one."""
        if measure is None and len(self.values) != 1:
            raise ValueError(f"name the measure: this comparison has {', '.join(self.values) or 'none'}")
        name = next(iter(self.values)) if measure is None else measure
        self[name]  # raises for a wrong name
        return name

    def matrix(self, measure: str | None = None) -> Array:
        """The values, (len(sites_a), len(sites_b)); the name may be left out if there is one measure."""
        return self[self.only(measure)].value.copy()

    def rows(self) -> list[dict[str, Any]]:
        """One dict per measure and pair of sites."""
        rows = []
        for name, values in self.values.items():
            arrays = {kind: getattr(values, kind) for kind in (*ARRAYS[1:-1], "score", ARRAYS[-1])}
            for i, site_a in enumerate(self.side_a.sites):
                for j, site_b in enumerate(self.side_b.sites):
                    caveats = dict.fromkeys(c.text for c in values.caveats if c.concerns(site_a, site_b))
                    rows.append(
                        {
                            "measure": name,
                            "model_a": self.side_a.name,
                            "model_b": self.side_b.name,
                            "site_a": site_a,
                            "site_b": site_b,
                            "value": float(values.value[i, j]),
                            "n": values.n,
                            **{kind: None if a is None else float(a[i, j]) for kind, a in arrays.items()},
                            "caveats": list(caveats),
                        }
                    )
        return rows

    def best_match(self, measure: str | None = None) -> list[dict[str, Any]]:
        """The closest site of B for each site of A, by the measure's own direction."""
        values = self[self.only(measure)]
        matches = []
        for i, j in enumerate(closest(values)):
            site_b, value = (None, float("nan")) if j is None else (self.side_b.sites[j], float(values.value[i, j]))
            matches.append({"site_a": self.side_a.sites[i], "site_b": site_b, "value": value})
        return matches

    def to_xarray(self) -> xarray.Dataset:
        """An xarray Dataset over site_a and site_b: each measure, and beside it <measure>_low, _high, _null …

        Sites that have one name are numbered, since coordinates are looked up by name.
        """
        try:
            import xarray
        except ImportError as error:
            raise ImportError("to_xarray() needs xarray: pip install 'sosie[xarray]'; matrix() does not") from error
        dims = ("site_a", "site_b")
        variables = {}
        for name, values in self.values.items():
            facts = {"n": values.n, "closer": values.closer, "statistic": values.statistic}
            for kind in ARRAYS:
                if (array := getattr(values, kind)) is not None:
                    variables[name if kind == "value" else f"{name}_{kind}"] = (dims, array.copy(), facts)
        sites = [apart(side.sites) for side in (self.side_a, self.side_b)]
        about = {"model_a": self.side_a.name, "model_b": self.side_b.name, "rows": self.rows_rule}
        return xarray.Dataset(variables, dict(zip(dims, sites, strict=True)), about)

    def plot(self, measure: str | None = None) -> Figure:
        """A matplotlib figure with the heat map and the curves; the first measure unless one is named."""
        return figure(self, measure)

    def log(self, writer: Any, step: int | None = None) -> None:
        """Log the means over layers at the same depth and of the best matches.

        With p-values, also the share of pairs that are distinguishable from chance. `writer` is a TensorBoard
        SummaryWriter, a run of W&B or trackio (or these modules), `mlflow`, a logger of Lightning or a LightningModule.
        """
        log_scalars(writer, self.scalars(), step)

    def scalars(self) -> dict[str, float]:
        """What `log` logs, by name."""
        from .summary import summarise

        scalars = {}
        for name in self.values:
            summary = summarise(self, name)
            if summary.best_mean is not None:
                scalars[f"sosie/{name}/best_match"] = summary.best_mean
            if summary.diagonal_mean is not None:
                scalars[f"sosie/{name}/same_depth"] = summary.diagonal_mean
            share = share_distinguishable(at_layers(self, name))
            if share is not None:
                scalars[f"sosie/{name}/distinguishable"] = share
        return scalars

    def as_json(self) -> dict[str, Any]:
        return {
            "side_a": asdict(self.side_a),
            "side_b": asdict(self.side_b),
            "rows_rule": self.rows_rule,
            "provenance": self.provenance,
            "values": {name: values.as_json() for name, values in self.values.items()},
            "kind": self.kind,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Comparison | Comparisons:
        if "pairs" in content:
            return Comparisons.from_json(content, path)
        check_schema(path, content, schema_of(cls) | {"values": {str: ESTIMATE}})
        empty: Comparison = rebuilt(cls, content | {"values": {}})
        shape = (len(empty.side_a.sites), len(empty.side_b.sites))
        values = {name: Estimate.from_json(each, shape) for name, each in content["values"].items()}
        kind = content.get("kind") or _kind_of(empty.rows_rule, values, empty.side_a)
        return replace(empty, values=values, kind=kind)

    def __repr__(self) -> str:
        a, b = self.side_a, self.side_b
        return (
            f"<Comparison {a.name} ({len(a.sites)} sites) x {b.name} ({len(b.sites)} sites): {', '.join(self.values)}>"
        )

    def _repr_html_(self) -> str:
        return html_figures(self)


def log_scalars(writer: Any, scalars: Mapping[str, float], step: int | None = None) -> None:
    """Log numbers by name to any kind of writer, recognised by its methods."""
    if hasattr(writer, "add_scalar"):  # TensorBoard
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):  # mlflow and Lightning's loggers; mlflow refuses other characters
        allowed = {re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII): value for name, value in scalars.items()}
        writer.log_metrics(allowed, step=step)
    elif hasattr(writer, "log_batch"):
        raise TypeError("an MlflowClient needs the id of a run: log to the module mlflow, within mlflow.start_run()")
    elif hasattr(writer, "log_dict"):  # a LightningModule, which knows the step
        writer.log_dict(dict(scalars))
    elif hasattr(writer, "log"):  # W&B and trackio
        writer.log(dict(scalars)) if step is None else writer.log(dict(scalars), step=step)
    else:
        raise TypeError(
            f"cannot log to {type(writer).__name__}: it has none of add_scalar (TensorBoard), log (W&B, trackio), "
            "log_metrics (mlflow, Lightning)"
        )


def _kind_of(rule: str, values: dict[str, Estimate], side: Side) -> Kind:
    """The kind of a comparison from an old file, which does not name it."""
    if {"mean_embedding", "kernel_norm"} <= set(values):
        return "transfer"
    if {"agreement_b", "cross_entropy"} <= set(values):
        return "stitching"
    if rule == "outputs":
        return "shifts" if len(side.sites) > 1 else "outputs"
    if rule in ("tensors", "entries of the input"):
        return "weights"
    return "sketches" if rule.endswith(" kernel") else "representations"


def closest(values: Estimate) -> list[int | None]:
    """The closest column of each row, by the measure's own direction; None where all values are undefined."""
    score = values.value if values.closer == "up" else -values.value
    return [None if np.isnan(row).all() else int(np.nanargmax(row)) for row in score]


# The row rules of both sides, as results and files state them


def rules_in_words(rule_a: str, rule_b: str) -> str:
    """The row rules of A and of B as one text: "cls and last", or "mean" where they are the same."""
    return " and ".join(dict.fromkeys([rule_a, rule_b]))


def rules_of(text: str) -> tuple[str, str]:
    """The row rules of A and of B from their text."""
    rule_a, _, rule_b = text.partition(" and ")
    return rule_a, rule_b or rule_a


# Which sites are layers: comparisons of weights may have one more site, for the whole model

TENSORS = "tensors"  # the row rule of comparisons of weights, tensor by tensor
WHOLE = "all"  # their site for the whole model: all parameters as one vector, or the mean over layers of atoms


def layers(sites: Sequence[str], rule: str = TENSORS) -> list[int]:
    """The indices of the sites that are layers; all of them if none is."""
    numbers = [k for k, site in enumerate(sites) if rule != TENSORS or site != WHOLE]
    return numbers or list(range(len(sites)))


def layers_of(comparison: Comparison) -> tuple[list[int], list[int]]:
    """The indices of the layers on both sides."""
    a, b = (layers(side.sites, comparison.rows_rule) for side in (comparison.side_a, comparison.side_b))
    return a, b


def at_layers(comparison: Comparison, measure: str) -> Estimate:
    """The estimate of a measure at layers only."""
    values, at = comparison[measure], np.ix_(*layers_of(comparison))
    arrays = {name: getattr(values, name) for name in ARRAYS}
    chosen: dict[str, Any] = {name: None if array is None else array[at] for name, array in arrays.items()}
    return replace(values, **chosen)


def same_depth(count_a: int, count_b: int) -> tuple[int, ...]:
    """The index of B's site at the same relative depth, for each of A's sites."""
    if count_a == 1:
        return (count_b - 1,) if count_b else ()
    return tuple(int(np.floor(i * (count_b - 1) / (count_a - 1) + 0.5)) for i in range(count_a))


def apart(names: Sequence[str]) -> list[str]:
    """The names, numbered where one occurs again: mix, mix@2."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}@{counts[name]}")
    return unique


def mean(curve: Array) -> float | None:
    """The mean of the defined values; None if there are none."""
    return None if np.isnan(curve).all() else float(np.nanmean(curve))


# All pairs of several models


class LazyComparisons(Mapping[Pair, Comparison]):
    """Comparisons that are made when they are first read, since many models have very many pairs."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        make: Callable[[int, int], Comparison],
        value: Callable[[int, int, str], Array],
        whole: Callable[[str], Array | None] | None = None,
    ) -> None:
        """`value` returns the values of a pair at layers, which is cheaper than the whole comparison.

        `whole` returns the model by model matrix of a measure at once, or None if it cannot.
        """
        self._made: dict[Pair, Comparison | None] = dict.fromkeys(pairs)
        self._make, self._value, self._whole = make, value, whole

    def __getitem__(self, pair: Pair) -> Comparison:
        comparison = self._made[pair]
        if comparison is None:
            comparison = self._made[pair] = self._make(*pair)
        return comparison

    def value(self, pair: Pair, measure: str) -> Array:
        """The values of a pair at layers only."""
        made = self._made[pair]
        return self._value(*pair, measure) if made is None else at_layers(made, measure).value

    def whole(self, measure: str) -> Array | None:
        """The model by model matrix, if it can be computed at once."""
        return None if self._whole is None else self._whole(measure)

    def __contains__(self, pair: object) -> bool:
        return pair in self._made

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True, eq=False)
class Comparisons(Result):
    """A `Comparison` for each pair i < j of models: `pairs[0, 1]`, `pairs["a", "b"]`, or loop over it."""

    format = Comparison.format
    names: tuple[str, ...]
    pairs: Mapping[Pair, Comparison]

    @property
    def kind(self) -> Kind:
        """The kind of all pairs."""
        return next(iter(self)).kind if self.pairs else "representations"

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Comparison]:
        return iter(self.pairs.values())

    def __getitem__(self, key: tuple[int | str, int | str]) -> Comparison:
        if not isinstance(key, tuple) or len(key) != 2:
            raise KeyError(f"index with a pair of models, as in comparisons[0, 1]; got {key!r}")
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
        """Model by model: the mean over layers of the value at the same depth; NaN where undefined.

        A pair i < j is compared in that direction. Below the diagonal the matrix repeats its values if the measure is
        symmetric, and is NaN if not: compare the models in the other order for those.
        """
        symmetric = _symmetric(measure)
        lazy = self.pairs if isinstance(self.pairs, LazyComparisons) else None
        if lazy is not None and (at_once := lazy.whole(measure)) is not None:
            return at_once
        matrix = np.full((len(self.names), len(self.names)), np.nan)
        for i, j in self.pairs:
            value = at_layers(self.pairs[i, j], measure).value if lazy is None else lazy.value((i, j), measure)
            average = mean(value[np.arange(len(value)), list(same_depth(*value.shape))])
            matrix[i, j] = np.nan if average is None else average
            if symmetric:
                matrix[j, i] = matrix[i, j]
        if self.pairs and (same := next(iter(self.pairs.values()))[measure].same) is not None:
            np.fill_diagonal(matrix, same)
        return matrix

    def mean(self) -> Comparison:
        """The mean over all pairs of models with the same sites, such as seeds of one network: site by site.

        Its 95 % interval is about other models of this kind on these inputs. It comes from the values without each
        model in turn (jackknife), with Student's t for as many degrees of freedom as there are models but one; it takes
        3 models, and is rather too wide than too narrow. `null` is the mean of the pairs' chance levels, and `p` the
        largest of their p: at this level every pair of models is alike beyond chance.
        """
        sides = {k: side for (i, j), pair in self.pairs.items() for k, side in ((i, pair.side_a), (j, pair.side_b))}
        count = len(self.names)
        if len(self.pairs) != count * (count - 1) // 2 or not self.pairs:
            raise ValueError(f"a mean needs every pair of 2 models or more; there are {len(self.pairs)} of {count}")
        for k, side in sides.items():
            if side.sites != sides[0].sites:
                raise ValueError(
                    f"a mean over pairs needs models with the same sites: {self.names[k]} has {', '.join(side.sites)}, "
                    f"and {self.names[0]} {', '.join(sides[0].sites)}; compare one architecture, or name sites="
                )
        first = next(iter(self))
        a, b = (replace(sides[0], name=name, left_out=()) for name in (f"each of {count} models", "the others"))
        values = {name: self._mean(name) for name in first.measures if all(name in pair.values for pair in self)}
        return Comparison(a, b, values, first.rows_rule, {**first.provenance, "mean of": list(self.names)}, first.kind)

    def _mean(self, measure: str) -> Estimate:
        every, symmetric, count = [pair[measure] for pair in self], _symmetric(measure), len(self.names)

        def all_pairs(name: str) -> Array | None:
            arrays = [getattr(values, name) for values in every]
            if any(array is None for array in arrays):
                return None
            return np.stack([*arrays, *(array.T for array in arrays)] if symmetric else arrays)

        value = all_pairs("value")
        assert value is not None
        parts: dict[str, Any] = {}
        for name in ("null", "null_spread", "p", "p_search"):
            array = all_pairs(name)
            parts[name] = None if array is None else array.mean(0) if "null" in name else array.max(0)
        pairs = np.array(list(self.pairs) * (1 + symmetric))
        ends: Interval = (None, None)
        if count > 2:
            from scipy.special import stdtrit

            left = np.stack([value[(pairs != k).all(1)].mean(0) for k in range(count)])
            reach = stdtrit(count - 1, 0.975) * np.sqrt((count - 1) * left.var(0))
            least, most = (np.nan if bound is None else bound for bound in every[0].bounds)
            ends = np.fmax(value.mean(0) - reach, least), np.fmin(value.mean(0) + reach, most)
        about = f"mean over {len(every)} pairs of {count} models"
        interval = "the interval is about other such models" if count > 2 else "an interval takes 3 models"
        shared = [caveat for caveat in every[0].caveats if all(caveat in values.caveats for values in every)]
        if own := sum(len(values.caveats) > len(shared) for values in every):
            shared.append(Caveat(f"{own} of {len(every)} pairs have caveats of their own: look at each"))
        return replace(
            every[0], value=value.mean(0), low=ends[0], high=ends[1], block_error=None, **parts,
            caveats=(Caveat(f"{about}: {interval}, on these inputs"), *shared),
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """One dict per pair of models, measure and pair of sites: that of `Comparison.rows` with both models' names."""
        return [
            {"model_a": self.names[i], "model_b": self.names[j], **row}
            for (i, j), comparison in self.pairs.items()
            for row in comparison.rows()
        ]

    def plot(self, measure: str | None = None) -> Figure:
        """A matplotlib figure of the model by model matrix; the first measure unless one is named."""
        return figure(self, measure)

    def as_json(self) -> dict[str, Any]:
        pairs = [{"i": i, "j": j, **comparison.as_json()} for (i, j), comparison in self.pairs.items()]
        return {"names": list(self.names), "pairs": pairs}

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | os.PathLike[str]) -> Comparisons:
        check_schema(path, content, {"names": [str], "pairs": [{"i": int, "j": int}]})
        pairs: dict[Pair, Any] = {(pair["i"], pair["j"]): Comparison.from_json(pair, path) for pair in content["pairs"]}
        names = tuple(content["names"])
        if any(not 0 <= i < j < len(names) for i, j in pairs):
            raise ValueError(f"pairs {sorted(pairs)} do not fit {len(names)} models")
        return cls(names, pairs)

    def __repr__(self) -> str:
        return f"<Comparisons of {', '.join(self.names)}: {len(self.pairs)} pairs>"

    def _repr_html_(self) -> str:
        return html_figures(self)


def _symmetric(measure: str) -> bool:
    from ..measures import MEASURES

    known = MEASURES.get(measure.partition("(")[0])
    return known is None or known.symmetric


# Which values chance could have given, and how a p-value is written

LEVEL = 0.05  # a value that chance gives more often than this is not distinguishable from chance


def decisive_p(values: Estimate) -> Array | None:
    """The p-values that decide: corrected for the search if known, else the plain ones; NaN if neither is known."""
    if values.p_search is None:
        return values.p
    return values.p_search if values.p is None else np.where(np.isnan(values.p_search), values.p, values.p_search)


def by_chance(values: Estimate) -> Mask | None:
    """True where a defined value is not distinguishable from chance; None without p-values."""
    p = decisive_p(values)
    return None if p is None else (p > LEVEL) & np.isfinite(values.value)


def distinguishable(values: Estimate) -> Mask | None:
    """True where a defined value is distinguishable from chance; where p is NaN, this and `by_chance` are False."""
    p = decisive_p(values)
    return None if p is None else (p <= LEVEL) & np.isfinite(values.value)


def share_distinguishable(values: Estimate) -> float | None:
    """The share of pairs that are distinguishable from chance, among those whose p is known."""
    yes, no = distinguishable(values), by_chance(values)
    if yes is None or no is None or not (yes | no).any():
        return None
    return float(yes.sum() / (yes | no).sum())


def correction(values: Estimate) -> str:
    """Whether the deciding p-value is corrected for the search over pairs, in words."""
    return "not corrected for the search" if values.p_search is None else "corrected for the search"


def written_p(p: float, floor: float | None = None) -> str:
    """A p-value with three decimals, or four if three would not show on which side of the level it lies.

    At the smallest that its draws can give it is an upper bound: "≤ 0.005".
    """
    if not np.isfinite(p):
        return "unknown"
    if p < 0.001:
        return "<0.001"
    if floor is not None and p <= floor * (1 + 1e-6):
        return f"≤ {written_p(p)}"
    return f"{p:.4f}" if f"{p:.3f}" == f"{LEVEL:.3f}" else f"{p:.3f}"


def stars(p: float) -> str:
    if not np.isfinite(p):
        return ""
    return "n.s." if p > LEVEL else "*" * (1 + (p <= 0.01) + (p <= 0.001))


def doubts(values: Estimate, i: int, j: int | None, digits: int = 3) -> dict[str, str]:
    """The interval, chance and p of one pair as text, if known; "" if there is no pair (`j` is None)."""
    texts = {}
    if values.low is not None and values.high is not None:
        ends = (np.nan, np.nan) if j is None else (values.low[i, j], values.high[i, j])
        texts["interval"] = f"[{number(ends[0], digits)}, {number(ends[1], digits)}]" if np.isfinite(ends).all() else ""
    if values.null is not None:
        spread = "" if j is None or values.null_spread is None else f"±{number(values.null_spread[i, j], digits)}"
        texts["chance"] = "" if j is None else f"{number(values.null[i, j], digits)}{spread}"
    if (p := decisive_p(values)) is not None:
        p_value = np.nan if j is None else float(p[i, j])
        marks = stars(p_value)
        texts["p"] = f"{written_p(p_value, values.p_floor)} {marks:<4}" if marks and digits > 2 else marks
    return texts
