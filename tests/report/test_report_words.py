"""Names made safe, caveats counted, records flattened."""

from __future__ import annotations

import numpy as np
import pytest
from report_examples import side, similarity

from sosie.report.comparison import caveat_groups
from sosie.report.words import extent, flat, shorten, visible
from sosie.results import Caveat, Comparison


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("layer1.0", "layer1.0"),
        ("", "(no name)"),
        ("  ", "(no name)"),
        ("a\u202eb", "a<U+202E>b"),
        ("a\x1b[0m", "a<U+001B>[0m"),
        ("two\nlines", "two lines"),
        ("half \udc80", "half <U+DC80>"),
        ("👩‍🔬", "👩‍🔬"),
        ("مرحبا", "مرحبا"),
    ],
)
def test_visible(given, shown):
    assert visible(given) == shown


def test_shortening_keeps_the_number_that_tells_layers_apart():
    name = "encoder.layers.encoder_layer_11.self_attention"
    assert shorten(name, 24) == "encode…11.self_attention"
    assert shorten(name, 14) == "enc…11…tention"
    assert shorten(name, 46) == name
    for most in range(4, 46):
        assert len(shorten(name, most)) == most


def test_caveats_are_counted_once_a_text():
    caveats = (
        Caveat("row", site_a="a0"),
        Caveat("row", site_a="a0"),
        Caveat("cross", site_a="a1"),
        Caveat("cross", site_b="b2"),
        Caveat("all"),
        Caveat("one", "a2", "b0"),
        Caveat("nowhere", site_a="gone"),
    )
    a, b = side("a", ["a0", "a1", "a2"]), side("b", ["b0", "b1", "b2", "b3"])
    comparison = Comparison(a, b, {"m": similarity(np.zeros((3, 4)), caveats=caveats)})
    found = {group.text: group for group in caveat_groups(comparison, "m")}
    assert {text: group.reach for text, group in found.items()} == {
        "row": "concerns 4 pairs",
        "cross": "concerns 6 pairs",
        "all": "concerns all pairs",
        "one": "concerns 1 pair",
        "nowhere": "concerns 0 pairs",
    }


def test_nested_records_become_lines():
    record = {
        "data": {"name": "cifar10", "sizes": [1, 2]},
        "models": [{"file": "a"}, {"file": "b"}],
        "ok": True,
        "x": None,
    }
    assert dict(flat(record)) == {
        "data.name": "cifar10",
        "data.sizes": "1, 2",
        "models[0].file": "a",
        "models[1].file": "b",
        "ok": "yes",
        "x": "none",
    }


def test_extent_in_words():
    assert [extent(b) for b in ((0, 1), (None, 1), (0, None), (None, None))] == [
        "0 to 1",
        "at most 1",
        "0 or more",
        "any number",
    ]
