"""Which sites of two networks are stitched, and how: pairs, cuts of B, and the joint's form of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ...capture import Cut, LeakingCut, Site, as_found, count_inputs, cut, to_rows, watch
from ...models.joint import Form, Joint, Resize
from .halves import Half

Pairs = Literal["diagonal", "all"]
Pair = tuple[int, int]
PROBE = 2  # inputs that are run first, to learn the order and the shapes of the sites


@dataclass
class SitePairs:
    """The sites of both sides, numbered in execution order, and what there is to fit."""

    a: tuple[Site, ...]
    b: tuple[Site, ...]
    cuts: dict[int, Cut] = field(default_factory=dict)  # of B, by site
    joints: dict[Pair, Joint] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)  # pairs whose shapes cannot be joined, and why
    leaking: tuple[str, ...] = ()  # sites of B left out because something goes around them

    def groups(self) -> dict[Form, list[Pair]]:
        """Pairs whose rows are the same positions, under one of their forms."""
        found: dict[tuple[Any, ...], list[Pair]] = {}
        for pair, joint in self.joints.items():
            found.setdefault((joint.target.space, joint.target.tokens), []).append(pair)
        return {self.joints[pairs[0]].target: pairs for pairs in found.values()}


def find_pairs(
    halves: tuple[Half, Half], sites: tuple[Any, Any], pairs: Pairs, batch: Any, resize: Resize
) -> SitePairs:
    """Pair up the sites, cut B at each of its own, and see which pairs can be joined."""
    if pairs not in ("diagonal", "all"):
        raise ValueError(f"pairs is 'diagonal' (sites in their order) or 'all', got {pairs!r}")
    a, b = (_look(half, chosen, batch) for half, chosen in zip(halves, sites, strict=True))
    if pairs == "diagonal" and len(a) != len(b):
        names = [", ".join(site.label for site in side[:4]) + (", …" if len(side) > 4 else "") for side in (a, b)]
        raise ValueError(
            f"sites pair up in their order, but there are {len(a)} of A ({names[0]}) and {len(b)} of B ({names[1]}): "
            "choose as many with sites_a= and sites_b=, or pairs='all'"
        )
    cuts, leaking = _cuts(halves[1], b, batch, named=sites[1] is not None)
    kept = [j for j in range(len(b)) if j in cuts]
    if not kept:
        raise LeakingCut(f"something goes around every site of {halves[1].name}: {', '.join(leaking)}")
    of_a = kept if pairs == "diagonal" else list(range(len(a)))
    found = SitePairs(
        tuple(a[i] for i in of_a), tuple(b[j] for j in kept), {k: cuts[j] for k, j in enumerate(kept)}, leaking=leaking
    )
    for j in range(len(found.b)):
        for i in [j] if pairs == "diagonal" else range(len(found.a)):
            try:
                source, target = (Form.of(site.shape, site.channels_last) for site in (found.a[i], found.b[j]))
                found.joints[i, j] = Joint(source, target, resize)
            except ValueError as error:
                found.refused[i, j] = str(error)
    if not found.joints:
        raise ValueError(f"no pair of sites can be joined: {next(iter(found.refused.values()))}")
    return found


def _look(half: Half, sites: Any, batch: Any) -> tuple[Site, ...]:
    count = min(PROBE, count_inputs(batch))
    args, kwargs = half.call(cut(batch, 0, count))

    def check(site: Site, activation: Tensor) -> None:
        to_rows(activation, "flatten", site=site, inputs=count)  # leaves out what gives no rows

    with as_found(half.model), watch(half.model, sites, sink=check) as seen:
        seen.run(*args, **kwargs)
    return seen.sites


def _cuts(half: Half, sites: Sequence[Site], batch: Any, *, named: bool) -> tuple[dict[int, Cut], tuple[str, ...]]:
    """B cut at every site; a leak is an error where the sites were asked for, else the site is left out."""
    args, kwargs = half.call(batch)
    cuts, leaking = {}, []
    for j, site in enumerate(sites):
        try:
            found = Cut(half.model, site.label, *args, **kwargs)
            found.check(*args, **kwargs)
        except LeakingCut:
            if named:
                raise
            leaking.append(site.label)
        else:
            cuts[j] = found
    return cuts, tuple(leaking)
