"""What measures cost, on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ..results import Cost, Costs
from .text import NARROWEST, print_note, print_whole, safe_text
from .words import note_on_weights, shorten, visible

_STEPS = ("", "k", "M", "G", "T", "P")


def print_costs(found: Costs, console: Console | None = None) -> None:
    """A line for each measure and number of inputs, and how many times the least it takes."""
    console = console or Console()
    names = " and ".join(dict.fromkeys(visible(name) for name in found.models))
    console.print(safe_text(console, f"One pair of models ({names}), on {visible(found.device)}", "bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("measure", no_wrap=True, overflow="crop")
    for title in ("inputs", "FLOPs", "forward", "own", "× least", "time", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    room = max(console.width - 62, NARROWEST)
    least = min((cost.flops for cost in found if cost.flops), default=0)
    for cost in found:
        name = safe_text(console, shorten(visible(cost.measure), room))
        table.add_row(name, "none" if cost.probes is None else f"{cost.probes:,}", *_numbers(cost, least))
    print_whole(table, console)
    for text in sentences(found):
        console.print(safe_text(console, text, "dim"))
    print_note(console, note_on_weights(found.provenance))


def sentences(found: Costs) -> list[str]:
    """What the numbers are of."""
    own = {cost.measure: cost for cost in found}
    sites = sorted({cost.sites for cost in own.values()})
    lines = [
        "FLOPs: multiplications and additions of products, convolutions and factorisations, in both forward passes and "
        f"in the measure itself, for {' or '.join(map(str, sites))} values. Elementwise work is not counted.",
        f"memory: the most {visible(found.memory)} at a time, beyond the models and the inputs. Rows of activations: "
        f"{visible(found.rows_rule)}.",
    ]
    for cost in own.values():
        if cost.unknown:
            lines.append(f"{visible(cost.measure)} also ran {', '.join(map(visible, cost.unknown))}: not counted.")
    return lines


def _numbers(cost: Cost, least: int) -> list[str]:
    times = f"{cost.flops / least:,.3g}" if least and cost.flops / least < 1000 else ""
    if least and not times:
        times = f"{cost.flops / least:.1e}"
    flops = [_short(number) for number in (cost.flops, cost.forward_flops, cost.measure_flops)]
    return [*flops, times, _time(cost.seconds), f"{_short(cost.peak_bytes)}B"]


def _short(number: float) -> str:
    step = 0
    while number >= 999.5 and step + 1 < len(_STEPS):
        number, step = number / 1000, step + 1
    return f"{number:.3g} {_STEPS[step]}" if step else f"{number:.3g} "


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
