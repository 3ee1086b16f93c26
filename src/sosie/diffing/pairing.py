"""Which site of B belongs to which site of A."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..capture.calls import Seen
from ..checks import listed, nearest
from ..stats import real_numbers

WRAPPERS = ("_orig_mod", "module", "model")  # names that a wrapper puts before those of the model inside

_ADVICE = "Name pairs with map={site of A: site of B} (--map a=b), or choose sites_a and sites_b that belong together"


@dataclass(frozen=True)
class Pair:
    """A site of A and its counterpart of B, and how the two were found to belong together."""

    a: str
    b: str
    how: str
    axes: tuple[int, ...] | None = None  # the order of B's axes that gives A's
    fused: bool = False  # B's layer does what more than one of A's do, and takes what the first of those is given

    @property
    def is_doubtful(self) -> bool:
        """Whether nothing but its place and its shape speaks for the pair."""
        return self.how.startswith(("in order", "by shape"))

    def arranged(self, activation: Tensor) -> Tensor:
        """B's activation with its axes in A's order."""
        return activation if self.axes is None else activation.permute(self.axes)

    def as_in_b(self, activation: Tensor) -> Tensor:
        """A's activation with its axes in B's order."""
        if self.axes is None:
            return activation
        return activation.permute([self.axes.index(k) for k in range(activation.ndim)])


Map = Mapping[str, str] | Callable[[str], str | None] | str | os.PathLike[str] | None


def read_map(given: Map, sites_a: Sequence[str]) -> dict[str, str]:
    """{site of A: site of B} from a dict, a function of A's name, or a file with a line a=b for each."""
    if given is None:
        return {}
    if isinstance(given, (str, os.PathLike)):
        lines = [line.strip() for line in Path(given).read_text("utf-8").splitlines()]
        pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
        if wrong := [pair[0] for pair in pairs if not all(part.strip() for part in pair)]:
            raise ValueError(f"{given}: each line is a=b, a site of A and one of B; got {wrong[0]!r}")
        return {a.strip(): b.strip() for a, _, b in pairs}
    if isinstance(given, Mapping):
        return {str(a): str(b) for a, b in given.items()}
    if callable(given):
        return {a: b for a in sites_a if (b := given(a)) is not None}
    raise TypeError(f"map= is a dict {{site of A: site of B}}, a function or a file, got {type(given).__name__}")


def check_map(wanted: Mapping[str, str], sites_a: Sequence[str], sites_b: Sequence[str]) -> None:
    for a, b in wanted.items():
        for name, label, known in (("A", a, sites_a), ("B", b, sites_b)):
            if label not in known:
                raise ValueError(f"map= names {label!r}, which is not a site of {name}{nearest(label, known)}")
    if len(set(wanted.values())) < len(wanted):
        twice = next(b for b in wanted.values() if list(wanted.values()).count(b) > 1)
        raise ValueError(f"map= gives {twice!r} of B to several sites of A")


def pair_sites(
    a: Sequence[Seen],
    b: Sequence[Seen],
    *,
    wanted: Mapping[str, str] | None = None,
    under: tuple[str, str] | None = None,
    strict: bool = True,
) -> list[Pair]:
    """The pairs in the order of A: by the map, by name, else in order, by numbers and by shape between those.

    `under`: the names of the two modules that the sites lie in, which are left out of their names. Sites without a
    counterpart are left out. Nothing is guessed: where several pairings are possible, an error lists the candidates,
    but inside modules that belong together, or if not `strict`, such sites are left out too.
    """
    wanted, (home_a, home_b) = wanted or {}, under or ("", "")
    pairs = {x: Pair(x, y, "by the map") for x, y in wanted.items()}
    left_a = [x for x in a if x.label not in pairs]
    left_b = [y for y in b if y.label not in set(wanted.values())]
    known = {_inside(y.label, home_b): y for y in left_b}
    lost = [x for x in left_a if _inside(x.label, home_a) not in known]
    for x in left_a:
        if (y := known.get(_inside(x.label, home_a))) is None:
            continue
        if (last := _does_more(x, y, lost)) is not None:
            pairs[last.label] = Pair(last.label, y.label, "by their numbers", fused=True)
        elif _fuses(x, y):
            strict = False  # A has layers that B has not
        else:
            pairs[x.label] = Pair(x.label, y.label, "by name")
    if not pairs:
        for prefix_a, prefix_b in itertools.permutations(["", *WRAPPERS, "model.model"], 2):
            stripped = {_inside(y.label, prefix_b): y for y in left_b}
            same = [(x, stripped.get(_inside(x.label, prefix_a))) for x in left_a]
            found = {x.label: Pair(x.label, y.label, "by name without a prefix") for x, y in same if y is not None}
            if len(found) > len(pairs):
                pairs = found
    taken = {pair.b for pair in pairs.values()}
    pairs |= _in_order(a, [y for y in b if y.label not in taken], b, pairs, strict=strict and under is None)
    return [pairs[x.label] for x in a if x.label in pairs]


def _fuses(x: Seen, y: Seen) -> bool:
    """Whether a quantised layer also does what follows the layer of its name in A: the norm, the activation."""
    if not _is_quantised(y) or _is_quantised(x):
        return False
    return _relative_error(_sample(x.activation), _sample(y.activation)) > SAME_NUMBERS


def _does_more(x: Seen, y: Seen, lost: Sequence[Seen]) -> Seen | None:
    """The site of A, without a counterpart, whose numbers B's layer gives instead of those of the layer of its name:
    the norm or the activation after it, if B has fused them.
    """
    numbers = _sample(y.activation)
    errors = [_relative_error(_sample(z.activation), numbers) if z.shape == y.shape else math.inf for z in lost]
    least = min(errors, default=math.inf)
    fuses = least <= NEAR and AHEAD * least < _relative_error(_sample(x.activation), numbers)
    return lost[errors.index(least)] if fuses else None


def _is_quantised(site: Seen) -> bool:
    return site.dtype == torch.quint8


def _inside(label: str, prefix: str) -> str:
    """A label without a prefix, and "@2" where the call's number is counted in the whole model left as it is."""
    return label.removeprefix(f"{prefix}.") if prefix else label


def _in_order(
    a: Sequence[Seen], free_b: Sequence[Seen], b: Sequence[Seen], pairs: Mapping[str, Pair], *, strict: bool
) -> dict[str, Pair]:
    """Pairs between two neighbouring ones that are known: sites of one shape, if they are as many on both sides.

    Where they are not, sites that give nearly the same numbers come first, and then what lies between those.
    """
    free = {y.label for y in free_b}
    found: dict[str, Pair] = {}
    for run_a, run_b in _runs(a, b, pairs):
        run_a = [x for x in run_a if x.label not in pairs]
        run_b = [y for y in run_b if y.label in free]
        if _all_alike(run_a, run_b):
            found |= {x.label: Pair(x.label, y.label, "in order") for x, y in zip(run_a, run_b, strict=True)}
            continue
        near = {
            x.label: Pair(x.label, y.label, "by their numbers", fused=_is_quantised(y) and not _is_quantised(x))
            for x, y in by_numbers(run_a, run_b)
        }
        found |= near
        for some_a, some_b in _runs(run_a, run_b, near):
            found |= _between(some_a, some_b, strict=strict)
    return found


def _runs(
    a: Sequence[Seen], b: Sequence[Seen], pairs: Mapping[str, Pair]
) -> Iterator[tuple[Sequence[Seen], Sequence[Seen]]]:
    """The sites of both sides between two neighbouring pairs, of those that are in one order on both sides."""
    place_b = {y.label: k for k, y in enumerate(b)}
    known = [(k, place_b[pairs[x.label].b]) for k, x in enumerate(a) if x.label in pairs]
    known = [pair for pair in known if all((pair[0] < o[0]) == (pair[1] < o[1]) for o in known if o != pair)]
    for (start_a, start_b), (end_a, end_b) in itertools.pairwise([(-1, -1), *known, (len(a), len(b))]):
        yield a[start_a + 1 : end_a], b[start_b + 1 : end_b]


def _between(run_a: Sequence[Seen], run_b: Sequence[Seen], *, strict: bool) -> dict[str, Pair]:
    if _all_alike(run_a, run_b):
        return {x.label: Pair(x.label, y.label, "in order") for x, y in zip(run_a, run_b, strict=True)}
    found: dict[str, Pair] = {}
    for shape in dict.fromkeys(tuple(sorted(x.shape)) for x in run_a):
        some_a, some_b = ([z for z in run if tuple(sorted(z.shape)) == shape] for run in (run_a, run_b))
        if len(some_a) == len(some_b) == 1:
            found[some_a[0].label] = Pair(some_a[0].label, some_b[0].label, "by shape")
        elif some_a and some_b and strict:
            raise ValueError(
                f"it is not clear which sites belong together: {_shown(some_a)} of A and {_shown(some_b)} of B. "
                f"{_ADVICE}"
            )
    return found


def _all_alike(a: Sequence[Seen], b: Sequence[Seen]) -> bool:
    return len(a) == len(b) and all(sorted(x.shape) == sorted(y.shape) for x, y in zip(a, b, strict=True))


SAME_NUMBERS = 0.3  # relative error below which numbers count as the same, allowing for an error
NEAR = 0.1  # relative error up to which two sites may give the same numbers, though for an error or rounding
AHEAD = 4  # times as far must be the next site, unless it gives the same numbers as well
SAMPLED = 4096  # numbers of a site
ROUNDING = 1e-5  # relative error up to which numbers are the same


def by_numbers(a: Sequence[Seen], b: Sequence[Seen]) -> list[tuple[Seen, Seen]]:
    """Sites that give nearly the same numbers, where no other comes near; in one order on both sides."""
    errors = torch.full((len(a), len(b)), math.inf, dtype=torch.float64)
    numbers_a, numbers_b = ([_sample(site.activation) for site in side] for side in (a, b))
    for i, j in itertools.product(range(len(a)), range(len(b))):
        if a[i].shape == b[j].shape:
            errors[i, j] = _relative_error(numbers_a[i], numbers_b[j])
    if not errors.numel():
        return []
    # Sites that pass on what they are given have the same numbers as others: then their order decides.
    near = (errors <= NEAR) & (errors <= _limit(errors)) & (errors <= _limit(errors.T).T)
    # The longest monotone chain of near pairs.
    best: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def chain(i: int, j: int) -> list[tuple[int, int]]:
        return best.get((i, j), [])

    for i, j in itertools.product(reversed(range(len(a))), reversed(range(len(b)))):
        ways = [chain(i + 1, j), chain(i, j + 1)]
        ways += [[(i, j), *chain(i + 1, j + 1)]] if near[i, j] else []
        best[i, j] = max(reversed(ways), key=len)
    return [(a[i], b[j]) for i, j in chain(0, 0)]


def _limit(errors: Tensor) -> Tensor:
    """(rows, 1): up to which error others are as near as the nearest of each row; −1 where one comes nearly so."""
    least = errors.amin(1, keepdim=True)
    limit = 1.25 * least + ROUNDING
    doubtful = ((errors > limit) & (errors <= AHEAD * least)).any(1, keepdim=True)
    return torch.where(doubtful, -1.0, limit)


def _sample(activation: Tensor | None) -> Tensor | None:
    """A few of its numbers, which stand at the same places in all activations of one shape."""
    if activation is None or not activation.numel():
        return None
    flat = real_numbers(activation).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].double().cpu()


def _relative_error(x: Tensor | None, y: Tensor | None) -> float:
    error, size = (math.inf, 0.0) if x is None or y is None else (float((x - y).norm()), float(x.norm()))
    return error / size if size and math.isfinite(error) else math.inf


def fused(a: Sequence[Seen], b: Sequence[Seen], pairs: Sequence[Pair]) -> Iterator[str]:
    """Sites without a counterpart whose numbers the other model gives side by side in one: a fused QKV."""
    paired_a, paired_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
    free_a, free_b = ([z for z in of if z.label not in paired] for of, paired in ((a, paired_a), (b, paired_b)))
    for parts, wholes, names in ((free_a, free_b, "AB"), (free_b, free_a, "BA")):
        for whole in wholes:
            for some in _side_by_side(parts, whole):
                labels = listed([part.label for part in some], 4)
                yield f"{whole.label} of {names[1]} gives what {labels} of {names[0]} give, side by side"


def _side_by_side(parts: Sequence[Seen], whole: Seen) -> Iterator[Sequence[Seen]]:
    """The runs of parts whose activations, one after the other along the last axis or the channels, are the whole."""
    for axis in {1, len(whole.shape) - 1} - {0}:
        rest = (*whole.shape[:axis], *whole.shape[axis + 1 :])
        fit = [p for p in parts if len(p.shape) > axis and (*p.shape[:axis], *p.shape[axis + 1 :]) == rest]
        for start in range(len(fit)):
            total = 0  # columns
            for stop in range(start, len(fit)):
                total += fit[stop].shape[axis]
                if total > whole.shape[axis]:
                    break
                some = fit[start : stop + 1]
                if total < whole.shape[axis] or len(some) < 2:
                    continue
                *inner, outer = (_corner(each.activation, axis) for each in (*some, whole))
                known = [corner for corner in inner if corner is not None]
                if len(known) == len(inner) and _relative_error(torch.cat(known, axis), outer) <= NEAR:
                    yield some


def _corner(activation: Tensor | None, axis: int) -> Tensor | None:
    """A few numbers of a large activation: all along one axis."""
    if activation is None or activation.is_complex():
        return None
    for other in {*range(activation.ndim)} - {axis}:
        activation = activation.narrow(other, 0, min(4, activation.shape[other]))
    return real_numbers(activation).double().cpu()


def no_pairs(a: Sequence[Seen], b: Sequence[Seen]) -> ValueError:
    """The error where no site of A has a counterpart in B."""
    return ValueError(
        f"no site of A has a counterpart in B: their names differ, and so do their number, order or shapes. A has "
        f"{len(a)}: {_shown(a)}. B has {len(b)}: {_shown(b)}. {_ADVICE}"
    )


def _shown(sites: Sequence[Seen]) -> str:
    return listed([f"{each.label} {list(each.shape[1:])}" for each in sites], 8)
