"""Narrow terminals: whatever gives way, a number is printed whole."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from report_examples import doubted, pair, several, side, stages
from rich.console import Console
from rich.table import Column, Table
from test_report_dynamics import example as dynamics
from test_report_leaderboard import example as leaderboard
from test_report_transfer import several as transfers

from sosie.report import (
    print_answer,
    print_comparison,
    print_costs,
    print_dynamics,
    print_leaderboard,
    print_numbers,
    print_sites,
    print_table,
)
from sosie.results import Comparison, Cost, Costs, Family

NUMBER = re.compile(r"(?<![^\s\[])[-+]?\d[\d,.]*(?:e[-+]?\d+)?(?:±[\d.e-]+)?(?![^\s\],?])")
ROWS = [
    {"name": "a-model-with-a-long-name", "recorded": "child", "score": 0.8267, "above": 6.123e-05, "weights": -0.01485,
     "architecture": "SomethingLong", "task": "clothes"},
    {"name": "b", "recorded": None, "score": 1.0, "above": -1.234e-11, "weights": 1234567.0,
     "architecture": "small_cnn", "task": None},
]  # fmt: skip


def family() -> Family:
    rows = [{**row, "early": 0.9876, "cka": 0.5432, "atoms": None} for row in ROWS]
    return Family({"query": "q", "recorded_parent": None}, tuple(rows))


def one_pair() -> Comparison:
    found = doubted(["logits"], ["logits"])
    return replace(found, side_a=side("a" * 30, ["logits"]), side_b=side("b" * 30, ["logits"]))


def costs() -> Costs:
    made = [Cost(f"measure_{k}", 1000, 4, 10**k, 10**k, 1.234 * 10**k, 10 ** (k + 3), "rows") for k in range(1, 12, 3)]
    return Costs(("a", "b"), tuple(made), "cpu", "bytes", "flatten", {})


def tables() -> list[Any]:
    found: dict[str, Callable[[Console], None]] = {
        "rows": lambda console: print_table(ROWS, console=console),
        "answer": lambda console: print_answer(family(), console),
        "numbers": lambda console: print_numbers("t", {"one of them " * 5: 1.234e-05, "two": 0.9876}, console),
        "sites": lambda console: print_sites("net", [("a" * 40, (64, 112, 112), 802816, "Conv2d" * 5)], console),
        "costs": lambda console: print_costs(costs(), console),
        "leaderboard": lambda console: print_leaderboard(leaderboard(), console),
        "dynamics": lambda console: print_dynamics(dynamics(), console),
        "transfer": lambda console: print_comparison(transfers(), console),
        "one pair": lambda console: print_comparison(one_pair(), console),
        "models": lambda console: print_comparison(several(), console),
    }
    return [pytest.param(show, id=name) for name, show in found.items()]


def printed(show: Callable[[Console], None], width: int) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width))
    return out.getvalue()


def numbers(text: str) -> set[str]:
    """Those that stand alone; "… 3 more" counts columns."""
    return {found.rstrip(",") for found in NUMBER.findall(re.sub(r"… \d+ more", "", text))}


@pytest.mark.parametrize("show", tables())
def test_every_number_is_whole(show: Callable[[Console], None]) -> None:
    whole = numbers(printed(show, 1000))
    assert len(whole) > 1
    for width in (20, 40, 60, 80, 120):
        assert numbers(printed(show, width)) <= whole, width


@pytest.mark.parametrize("show", tables())
def test_tables_fit_where_there_is_room(show: Callable[[Console], None]) -> None:
    for width in (80, 100, 120):
        assert max(map(len, printed(show, width).splitlines())) <= width


def test_one_digit_less_is_rounded_not_cut() -> None:
    def show(console: Console) -> None:
        print_comparison(pair(stages(9), stages(9)), console)

    whole = numbers(printed(show, 1000))
    assert numbers(printed(show, 80)) == whole
    for width in (20, 40):
        for number in numbers(printed(show, width)) - whole:
            assert len(number.partition(".")[2]) == 2, number
            assert any(abs(float(number) - float(full)) <= 0.0055 for full in whole), number


def test_words_give_way_first_and_what_is_left_out_is_named() -> None:
    whole = numbers(printed(lambda console: print_table(ROWS, console=console), 1000))
    for width in (40, 60, 80):
        text = printed(lambda console: print_table(ROWS, console=console), width)
        assert numbers(text) == whole, width
        for heading in ("name", "score", "above", "weights"):
            assert heading in text
        for column in ("recorded", "architecture", "task"):
            assert column in text  # as a heading, or as one of those left out
    assert "left out" not in printed(lambda console: print_table(ROWS, console=console), 80)
    assert "left out" in printed(lambda console: print_table(ROWS, console=console), 40)


def test_long_headings_of_numbers_are_broken_at_words() -> None:
    rows = [{"name": "a", "log_mean_over_norm": 1.5, "mean_embedding": 2.25}]
    text = printed(lambda console: print_table(rows, console=console), 30)
    for part in ("log", "mean", "over", "norm", "embedding", "1.5000", "2.2500"):
        assert re.search(rf"\b{part}\b", text), part
    assert max(map(len, text.splitlines())) <= 30


def test_a_cut_number_would_be_seen() -> None:
    def cut(console: Console) -> None:
        table = Table(Column("name", no_wrap=True), Column("score", no_wrap=True, overflow="crop"), box=None)
        table.add_row("x" * 20, "0.8267")
        console.print(table)

    assert not numbers(printed(cut, 20)) <= numbers(printed(cut, 1000))
