"""A diff on the terminal and as a page: the verdict, the layer that makes the error, harmless names, odd values."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_examples import HOSTILE
from rich.console import Console

import sosie
from sosie.report import print_diff, write_report
from sosie.results import Diff, OutputDiff, Place, SiteDiff, TensorDiff

BLOCKS = 40


def example(names: str = "layers.{}", guilty: int = 14) -> Diff:
    """One layer of forty makes an error of 0.02; it was opened, and the first part of it makes it all."""
    sites = []
    for k in range(BLOCKS):
        name, made = names.format(k), 0.02 if k == guilty else 3e-7
        error = made if k < guilty else 0.02
        site = SiteDiff(
            name, name, "by name", (8, 4), "float32", "float32", error, made=made, floor=4e-7, made_floor=2e-7,
            beyond=k >= guilty, sqnr=34.0, largest=3 * error, at=Place(17, (3, 1)), cosine=0.9, least_cosine=0.5,
            mismatched=0.25, quantiles=(1e-3, 2e-3, 3e-3, 4e-3), shift=0.0, slope=1.0, inputs=64,
        )  # fmt: skip
        sites.append(site)
        if k == guilty:
            sites += [
                replace(site, site_a=f"{name}.attn", site_b=f"{name}.attn", inside=name),
                replace(site, site_a=f"{name}.mlp", site_b=f"{name}.mlp", inside=name, made=2e-7, beyond=False),
            ]
    outputs = (
        OutputDiff("kl_divergence", 0.0123, 0.011, 0.014, meaning="KL divergence of B from A"),
        OutputDiff("kl_divergence, largest", 2.3, at=Place(3, (17,))),
    )
    weights = (
        TensorDiff("w", "w", (64, 32), "float32", "float16", False, 0.1, 0.3, (1, 2), 12.2, 4, ("tied to v",)),
        TensorDiff("u", None, (3,), "float32", None, False, None),
        TensorDiff("v", "model.v", (3,), "float32", "float32", True, 0.0),
    )
    return Diff(
        "base", "ported", False, "Different: layers.14.attn makes it.", "layers.14.attn", tuple(sites), outputs,
        weights,
        floor="another batch size", factor=8.0, unpaired_a=("head",), caveats=("inputs were cast",),
        provenance={"sosie": "0"},
    )  # fmt: skip


def printed(found: Diff, width: int = 100, **options: Any) -> str:
    raw = io.StringIO()
    print_diff(found, Console(file=raw, width=width), **options)
    return raw.getvalue()


def test_the_terminal_shows_the_verdict_and_the_layer_that_makes_the_error() -> None:
    text = printed(example())
    assert text.startswith("Different: layers.14.attn makes it.\n")
    assert "layers.14.attn" in text
    assert "layers.39" not in text  # farther away than there is room for
    assert sum(map(int, re.findall(r"… (\d+) more", text))) == BLOCKS + 2 - 24
    assert "Floor: another batch size. Beyond: more than 8 times that." in text
    assert "0.0110 to 0.0140" in text
    assert "input 3 [17]" in text
    assert "u (only in A)" in text
    assert "rank 4; tied to v" in text
    assert "1 site of base without a counterpart: head" in text
    whole = printed(example(), full=True)
    assert all(f"layers.{k} " in whole for k in range(BLOCKS))
    assert "more" not in whole.replace("more than", "")


def test_a_diff_shows_its_verdict_and_not_its_fields() -> None:
    assert repr(example()).startswith("Different: layers.14.attn makes it.\nsite")
    assert "SiteDiff(" not in repr(example())


def test_a_saved_diff_is_read_again(tmp_path: Path) -> None:
    found = sosie.load(example().save(tmp_path / "d.json"))
    assert isinstance(found, Diff)
    assert found.rows() == example().rows()
    assert (found.outputs, found.weights, found.verdict) == (example().outputs, example().weights, example().verdict)
    assert printed(found) == printed(example())
    assert [site.site_a for site in found.worst(1)] == ["layers.14"]
    with pytest.raises(TypeError, match=r"ask for \.same"):
        bool(found)


@pytest.mark.browser
@pytest.mark.parametrize("width", [420, 1400])
def test_the_page(look: Callable[..., Any], width: int) -> None:
    seen = look(example(), width=width)
    assert seen.complaints == []
    assert seen.page.locator("h1").inner_text() == "base and ported"
    titles = seen.page.locator("main h3").all_inner_texts()
    assert titles == [
        "Error along the layers", "Inside the layers that make it", "Site by site", "What they answer",
        "What they are made of", "Caveats", "Provenance",
    ]  # fmt: skip
    assert seen.page.locator(".beyond-ring").count() == BLOCKS - 14
    inside = seen.page.locator("section", has_text="Inside the layers").locator("tbody tr")
    assert inside.count() == 3
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0, 1e-300, 1e300])
def test_odd_values_do_not_break_the_page(look: Callable[..., Any], odd: float) -> None:
    plain = example()
    sites = tuple(replace(site, error=odd, made=odd, floor=0.0, largest=odd, sqnr=None) for site in plain.sites)
    seen = look(replace(plain, sites=sites, factor=None))
    assert seen.complaints == []
    assert seen.page.locator("svg.curve").count() == 1
    assert "NaN" not in seen.page.locator("main").inner_text()


@pytest.mark.browser
def test_names_are_harmless(look: Callable[..., Any]) -> None:
    text = HOSTILE[0]
    seen = look(replace(example(names=text + "{}"), name_a=text, verdict=text, caveats=(*HOSTILE,)))
    assert seen.complaints == []
    assert seen.requests == [seen.path.as_uri()]


@pytest.mark.browser
def test_weights_alone(look: Callable[..., Any]) -> None:
    seen = look(replace(example(), sites=(), outputs=(), caveats=(), unpaired_a=(), provenance={}))
    assert seen.complaints == []
    assert seen.page.locator("main h3").all_inner_texts() == ["What they are made of", "Provenance"]


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Diff"):
        write_report("no result", tmp_path / "page.html")  # type: ignore[arg-type]
