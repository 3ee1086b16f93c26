"""Which site of B belongs to which site of A."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..capture.calls import Seen
from ..checks import listed, nearest

WRAPPERS = ("_orig_mod", "module", "model")  # names that a wrapper puts before those of the model inside

_ADVICE = "Name pairs with map={site of A: site of B} (--map a=b), or choose sites_a and sites_b that belong together"


@dataclass(frozen=True)
class Pair:
    """A site of A and its counterpart of B, and how the two were found to belong together."""

    a: str
    b: str
    how: str
    axes: tuple[int, ...] | None = None  # the order of B's axes that gives A's

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
        if wrong := [a for a, sign, b in pairs if not (sign and a.strip() and b.strip())]:
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
) -> list[Pair]:
    """The pairs in the order of A: by the map, by name, else in order and by shape between those.

    `under`: the names of the two modules that the sites lie in, which are left out of their names. Sites without a
    counterpart are left out. Nothing is guessed: where several pairings are possible, an error lists the candidates,
    but inside modules that belong together such sites are left out too.
    """
    wanted, (home_a, home_b) = wanted or {}, under or ("", "")
    pairs = {x: Pair(x, y, "by the map") for x, y in wanted.items()}
    left_a = [x for x in a if x.label not in pairs]
    left_b = [y for y in b if y.label not in set(wanted.values())]
    known = {_inside(y.label, home_b): y for y in left_b}
    for x in left_a:
        if (y := known.get(_inside(x.label, home_a))) is not None:
            pairs[x.label] = Pair(x.label, y.label, "by name")
    if not pairs:
        for prefix_a, prefix_b in itertools.permutations(["", *WRAPPERS, "model.model"], 2):
            stripped = {_inside(y.label, prefix_b): y for y in left_b}
            same = [(x, stripped.get(_inside(x.label, prefix_a))) for x in left_a]
            found = {x.label: Pair(x.label, y.label, "by name without a prefix") for x, y in same if y is not None}
            if len(found) > len(pairs):
                pairs = found
    taken = {pair.b for pair in pairs.values()}
    pairs |= _in_order(a, [y for y in b if y.label not in taken], b, pairs, strict=under is None)
    return [pairs[x.label] for x in a if x.label in pairs]


def _inside(label: str, prefix: str) -> str:
    """A label without a prefix, and "@2" where the call's number is counted in the whole model left as it is."""
    return label.removeprefix(f"{prefix}.") if prefix else label


def _in_order(
    a: Sequence[Seen], free_b: Sequence[Seen], b: Sequence[Seen], pairs: Mapping[str, Pair], *, strict: bool
) -> dict[str, Pair]:
    """Pairs between two neighbouring ones that are known: sites of one shape, if they are as many on both sides."""
    place_b = {y.label: k for k, y in enumerate(b)}
    known = [(k, place_b[pairs[x.label].b]) for k, x in enumerate(a) if x.label in pairs]
    known = [pair for pair in known if all((pair[0] < o[0]) == (pair[1] < o[1]) for o in known if o != pair)]
    found: dict[str, Pair] = {}
    free = {y.label for y in free_b}
    for (start_a, start_b), (end_a, end_b) in itertools.pairwise([(-1, -1), *known, (len(a), len(b))]):
        run_a = [x for x in a[start_a + 1 : end_a] if x.label not in pairs]
        run_b = [y for y in b[start_b + 1 : end_b] if y.label in free]
        if len(run_a) == len(run_b) and all(_alike(x, y) for x, y in zip(run_a, run_b, strict=True)):
            found |= {x.label: Pair(x.label, y.label, "in order") for x, y in zip(run_a, run_b, strict=True)}
            continue
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


def _alike(x: Seen, y: Seen) -> bool:
    return sorted(x.shape) == sorted(y.shape)


def no_pairs(a: Sequence[Seen], b: Sequence[Seen]) -> ValueError:
    """The error where no site of A has a counterpart in B."""

    return ValueError(
        f"no site of A has a counterpart in B: their names differ, and so do their number, order or shapes. A has "
        f"{len(a)}: {_shown(a)}. B has {len(b)}: {_shown(b)}. {_ADVICE}"
    )


def _shown(sites: Sequence[Seen]) -> str:
    return listed([f"{each.label} {list(each.shape[1:])}" for each in sites], 8)
