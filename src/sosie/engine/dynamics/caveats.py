"""Doubts about dynamics, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...measures import Measure
from ...results import Caveat, Side
from ...train.run_folder import Run, differ
from ..caveats import of_left_out

SHOWN = 6  # steps that are named
SORTED = (
    "safetensors files keep layers by name, not in order of depth: name the model as well (file.py:factory@weights) to "
    "have them in order"
)


def of_run(run: Run) -> Iterator[Caveat]:
    if run.note is not None:
        yield Caveat(f"{run.name}: {run.note}")
    yield from of_left_out(Side(run.name, (), (), (), left_out=tuple(run.about.left_out.items())))


def of_coefficients(a: Run, b: Run, sites: Sequence[str]) -> list[Caveat]:
    """Atoms belong to each other only as far as the coefficients stay the same."""
    found = []
    for run in dict.fromkeys((a, b)):
        moved = [site for site in run.coefficients_moved() if site in sites]
        text = (
            f"{run.name}: the coefficients were trained as well, so the atoms tell of a part of the change only; "
            "freeze(model, 'coefficients') keeps them"
        )
        found += [Caveat(text, site) for site in moved]
    if a is not b:
        ours, theirs = (run.coefficient_sums()[-1:, [run.sites.index(site) for site in sites]] for run in (a, b))
        text = f"{a.name} and {b.name} have other coefficients: atom i of one is not atom i of the other"
        found += [Caveat(text, site) for site, other in zip(sites, differ(ours, theirs), strict=True) if other]
    return found


def of_states(run: Run, site: str, undefined: Mapping[int, str]) -> Iterator[Caveat]:
    """States without a value, those of one reason together."""
    for reason in dict.fromkeys(undefined.values()):
        steps = [run.steps[k] for k, why in undefined.items() if why == reason]
        more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
        plural = "s" * (len(steps) > 1)
        yield Caveat(f"{run.name}, step{plural} {', '.join(map(str, steps[:SHOWN]))}{more}: {reason}", site)


def of_widths(measure: Measure, runs: Sequence[Run], site: str) -> Iterator[Caveat]:
    """Too few rows for the width."""
    for run in dict.fromkeys(runs):
        n, width = run.shape(site)
        if measure.few_rows is not None and n <= width:
            effects = {"biased": f"biased {measure.closer}", "infinite": "values are infinite"}
            effect = effects.get(measure.few_rows, "values saturate")
            yield Caveat(f"n={n} rows for a width of {width}: {effect}", site)
