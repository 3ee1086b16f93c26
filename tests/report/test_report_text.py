"""Tables on the terminal."""

from __future__ import annotations

import io

import pytest
from report_examples import HOSTILE, leaves, pair, several, stages, transformer
from rich.console import Console

from sosie.report import print_comparison, print_measures, print_sites

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
    print_comparison(pair(HOSTILE, HOSTILE), Console(file=out, width=100))
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert "0.927 | [0.914, 0.941] |  0.030 | 0.746|" in text  # numbers are not what is cropped
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
