"""Tables on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from report_examples import HOSTILE, doubted, leaves, pair, several, side, similarity, stages, transformer
from rich.console import Console

from sosie.report import print_comparison, print_measures, print_sites
from sosie.results import Comparison

FACT = {
    "name": "linear_cka",
    "summary": "Squared cross-covariance over the product of self-covariance norms.",
    "reads": "Alignment",
    "bounds": (0, 1),
    "same": 1.0,
    "closer": "up",
    "invariant": ["shift", "rotation"],
    "symmetric": True,
    "differentiable": False,
    "cost": "O(n p q)",
    "paper": "kornblith2019",
    "defaults": {},
}


def printed(show, *arguments, width=80, **options) -> str:
    out = io.StringIO()
    show(*arguments, console=Console(file=out, width=width), **options)
    assert max(map(len, out.getvalue().splitlines())) <= width
    return out.getvalue()


def test_a_comparison_in_words_and_numbers():
    comparison = pair(stages(9), transformer(27), hole=True)
    text = " ".join(printed(print_comparison, comparison, width=120).split())
    assert "By debiased_cka, resnet20 and resnet56 are most alike at conv1" in text
    best = comparison.best_match("debiased_cka")[3]
    assert f"layer2.2 {best['site_b']} {best['value']:.3f}" in text
    assert "- constant features: nothing to compare (concerns 9 pairs)" in text
    assert "- n=1024 < width=16384 (concerns 54 pairs)" in text
    assert "undefined" in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_long_tables_are_cut_in_the_middle_unless_asked_for(width):
    comparison = pair(leaves(126), leaves(126))
    short = printed(print_comparison, comparison, width=width)
    assert short.count("… 102 more") == 3
    assert "no name" not in short
    assert "layer4.15.conv3" in short
    full = printed(print_comparison, comparison, width=width, full=True)
    assert "more" not in full.replace("more alike", "")
    assert all(site in full for site in comparison.sites_a)


def unclear(**changes) -> Comparison:
    """Three layers; the last's best match, and the second at the same depth, chance could have given too."""
    value = np.array([[0.9, 0.1, 0.1], [0.5, 0.04, 0.1], [0.02, 0.031, 0.0101]])
    p = np.array([[0.001, 0.2, 0.2], [0.004, 0.6, 0.3], [0.5, 0.312, 0.9]])
    facts = {"null": value * 0 + 0.02, "null_spread": value * 0 + 0.013, "p": p / 10, "p_search": p}
    sites = [f"layer{k}" for k in range(3)]
    found = replace(similarity(value, **facts), **changes)
    return Comparison(side("one", sites), side("two", sites), {"m": found})


def test_chance_stands_beside_each_value_and_what_it_could_give_is_marked():
    text = printed(print_comparison, unclear())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "one best in two value interval chance p depth" in lines
    assert "layer0 layer0 0.900 [0.885, 0.915] 0.020±0.013 0.001 *** 0.900" in lines
    assert "layer1 layer0 0.500 [0.465, 0.535] 0.020±0.013 0.004 ** 0.040?" in lines
    assert "layer2 layer1 0.031? [-0.027, 0.089] 0.020±0.013 0.312 n.s. 0.010?" in lines
    assert "? and n.s.: not distinguishable from chance (p corrected for the search)" in " ".join(text.split())
    plain = printed(print_comparison, unclear(p=None, p_search=None, null=None, null_spread=None))
    assert not set("?±*") & set(plain)


def test_the_plain_p_decides_where_no_other_is_known():
    text = printed(print_comparison, unclear(p_search=None))
    assert "0.031 *" in text
    assert "0.031?" not in text
    assert "(p not corrected for the search)" in " ".join(text.split())
    holes = np.full((3, 3), np.nan)
    assert "0.031 *" in printed(print_comparison, unclear(p_search=holes))
    assert "0.031 " in printed(print_comparison, unclear(p_search=holes, p=holes))  # unknown: neither mark


def test_marks_are_dimmed_on_a_terminal():
    out = io.StringIO()
    print_comparison(unclear(), Console(file=out, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[2m0.031?\x1b[0m" in out.getvalue()
    assert "\x1b[2m0.900" not in out.getvalue()


def test_small_values_keep_their_digits():
    tiny = unclear()["m"].value / 1000
    names = tuple(f"a.rather.long.name.of.a.layer.{k}" for k in range(3))
    comparison = replace(unclear(value=tiny), side_b=replace(unclear().side_b, sites=names))
    assert "3.1e-05?" in printed(print_comparison, comparison, width=90)
    mixed = unclear(value=np.where(tiny > 4e-4, 0.5, tiny))
    assert "0.00?" in printed(print_comparison, replace(comparison, values=mixed.values))


def test_values_near_1_keep_their_digits():
    names = tuple(f"a.rather.long.name.of.a.layer.{k}" for k in range(3))
    comparison = replace(unclear(value=1 - unclear()["m"].value / 100), side_b=replace(unclear().side_b, sites=names))
    assert "0.991" in printed(print_comparison, comparison, width=80)


def test_names_are_neither_markup_nor_escape_sequences():
    text = printed(print_comparison, pair(HOSTILE, HOSTILE[::-1], names=("[bold]a[/bold]", "b\x1b[2J")), width=400)
    assert "\x1b" not in text
    assert "[red]x[/red]" in text
    assert "[bold]a[/bold]" in text
    assert "b<U+001B>[2J" in text


def test_no_colour_codes_into_a_pipe_or_without_colour(monkeypatch):
    assert "\x1b" not in printed(print_comparison, pair(stages(3), stages(3)))
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    print_comparison(pair(stages(3), stages(3)), Console(file=out, width=80, force_terminal=True))
    assert "\x1b[33m" not in out.getvalue()


def test_an_old_encoding_is_no_reason_to_fail():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_comparison(doubted(HOSTILE, HOSTILE), Console(file=out, width=100))
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert "0.93 |[0.91, 0.94] |0.02+-0.05 |* | 0.75|" in text  # numbers are not what is cropped
    assert "* p <= 0.05" in text
    assert "U0001f52c block" in text


def test_several_models():
    text = printed(print_comparison, several(4))
    assert "seed-1 and seed-2 are the most alike" in text
    assert text.count("- By debiased_cka") == 6
    assert "… 14 more" in printed(print_comparison, several(18, 3))
    assert printed(print_comparison, several(3), full=True).count("best in") == 6


def test_measures_with_their_facts():
    odd = {
        **FACT,
        "name": "[x]",
        "bounds": (None, 1.0),
        "closer": "down",
        "same": 0.0,
        "invariant": [],
        "defaults": {"k": 10},
    }
    text = " ".join(printed(print_measures, [FACT, odd]).split())
    assert "linear_cka Squared cross-covariance" in text
    assert "0 to 1, higher is more alike, 1 with itself" in text
    assert "invariant to rotation, shift; symmetric; not differentiable" in text
    assert "[x]" in text
    assert "at most 1, lower is more alike" in text
    assert "defaults: k=10" in text


def test_sites_with_their_shapes():
    sites = [
        ("layer1.0", (16, 32, 32), 16384, "BasicBlock"),
        ("[b]fc[/b]", (10,), 10, "Linear"),
        ("s", (), 1, "Loss"),
    ]
    text = " ".join(printed(print_sites, "resnet20", sites).split())
    assert "resnet20: 3 sites" in text
    assert "layer1.0 16 × 32 × 32 16384 BasicBlock" in text
    assert "[b]fc[/b] 10 10 Linear" in text
    assert "0 sites" in printed(print_sites, "empty", [])
