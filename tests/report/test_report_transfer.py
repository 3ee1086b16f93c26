"""Transfer scores: the page, the terminal, the notebook and the sentences speak of adapting, not of likeness."""

from __future__ import annotations

import io

import numpy as np
import pytest
from report_examples import HOSTILE, pair, side, similarity
from rich.console import Console

from sosie.report import print_comparison
from sosie.report.comparison import contents, render, title
from sosie.results import TRANSFER, Caveat, Comparison, Comparisons, Side, summarise

MEANS = np.array([0.02, 0.005, 0.07])


def scored(name: str = "first", *, factor: float = 1.0, sites: list[str] | None = None) -> Comparison:
    sites = sites or ["conv1", "conv2", "fc"]
    column = np.resize(MEANS, len(sites))[:, None] * factor
    values = {}
    for k, score in enumerate(TRANSFER):
        value = column * 10.0**-k
        values[score] = similarity(
            value, doubt=False, closer="down", bounds=(0.0, None), same=None, low=0.9 * value, high=1.1 * value,
            caveats=(Caveat("few rows", sites[-1]),) if k == 1 else (),
        )  # fmt: skip
    return Comparison(side(name, sites), Side("probe", ("probe",), (0,), ((),)), values, kind="transfer")


def several() -> Comparisons:
    return Comparisons(("loud", "quiet", "probe"), {(0, 2): scored("loud", factor=3.0), (1, 2): scored("quiet")})


def printed(result: Comparison | Comparisons, width: int = 100, *, full: bool = False) -> str:
    stream = io.StringIO()
    print_comparison(result, Console(file=stream, width=width, legacy_windows=False), full=full)
    return stream.getvalue()


def test_which_results_are_scores() -> None:
    assert contents(scored())["pairs"][0]["transfer"] == list(TRANSFER.values())
    assert contents(pair(["a"], ["b"]))["pairs"][0]["transfer"] is None


def test_sentences_speak_of_adapting() -> None:
    assert summarise(scored(), "mean_embedding").sentence == (
        "On probe, first has the least to adapt at conv2 (0.005) and the most at fc (0.07), by mean_embedding."
    )
    assert summarise(scored(), "kernel_norm").sentence == (
        "By kernel_norm, first on probe goes from conv2 (0.0005) up to fc (0.007)."
    )
    assert "is 0.02" in summarise(scored(sites=["fc"]), "mean_embedding").sentence
    assert title(several()) == "loud and quiet on probe"


def test_layers_are_ranked_on_the_terminal() -> None:
    text = printed(scored())
    lines = [line.split() for line in text.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ")]
    assert [line[:3] for line in lines] == [["2", "conv2", "0.005"], ["1", "conv1", "0.02"], ["3", "fc", "0.07"]]
    assert "few rows (kernel_norm of fc)" in text
    assert "kernel_norm ± 10%" in text
    assert "alike" not in text
    assert "best" not in text


def test_models_are_ranked_on_the_terminal() -> None:
    text = " ".join(printed(several()).split())
    low, high = (f"{factor * MEANS.mean():.3g}" for factor in (1, 3))
    assert (
        f"On probe, quiet has the least to adapt (mean_embedding {low}, mean over its layers), loud the most ({high})"
        in text
    )
    assert text.index(f"quiet {low}") < text.index(f"loud {high}")
    assert printed(several(), full=True).count("Numbered from the input on") == 2


@pytest.mark.parametrize("width", [80, 140])
def test_tables_keep_to_the_width(width: int) -> None:
    text = printed(scored(sites=["encoder.layers.11.attention.output.dense", "b"]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "0.005" in text


def test_undefined_layers_come_last_and_say_so() -> None:
    c = scored()
    c["mean_embedding"].value[1] = np.nan
    text = printed(c)
    assert text.index("conv1") < text.rindex("conv2")
    assert "undefined" in text
    c["mean_embedding"].value[:] = np.nan
    assert summarise(c, "mean_embedding").sentence == "mean_embedding of first on probe is undefined everywhere."


def test_hostile_names_do_no_harm() -> None:
    c = scored(sites=HOSTILE)
    assert "\x1b[31mterminal" not in printed(c)
    assert "</script><img" not in render(c)
    assert "<svg onload" not in c._repr_html_()


def test_the_notebook_shows_every_score() -> None:
    html = scored()._repr_html_()
    assert html.index("conv2</td><td>0.005") < html.index("conv1</td><td>0.02")
    assert "log_mean_over_norm" in html
    assert "same depth" not in html


@pytest.mark.browser
def test_the_page_of_one_model(look) -> None:
    seen = look(scored())
    assert seen.page.locator(".kicker").inner_text().lower() == "how much is there to adapt?"
    assert seen.page.locator("svg.heatmap").count() == 0
    rows = seen.page.locator(".scores tbody tr")
    assert [text.split()[:3] for text in rows.all_inner_texts()] == [
        ["1", "conv2", "0.00500"], ["2", "conv1", "0.0200"], ["3", "fc", "0.0700"],
    ]  # fmt: skip
    dots = seen.page.locator("svg.curve circle.dot")
    heights = [dots.nth(k).bounding_box()["y"] for k in range(3)]
    assert heights[2] < heights[0] < heights[1], "more is further up"
    box = dots.nth(2).bounding_box()
    seen.page.mouse.move(box["x"] + 2, box["y"] + 2)
    tip = seen.page.locator(".tip").inner_text()
    for text in ("fc", "0.0700, 0.0630 to 0.0770", "log_mean_over_norm"):
        assert text in tip
    seen.page.locator("#tab-1").click()
    assert "few rows concerns 1 layer" in seen.page.locator("main").inner_text()
    words = seen.page.locator("body").inner_text()
    for wrong in ("alike", "Layer of A", "layers of A", "Best match", "Same depth"):
        assert wrong not in words, wrong
    assert seen.complaints == []


@pytest.mark.browser
def test_the_page_of_several_models(look) -> None:
    seen = look(several(), width=1000)
    models = seen.page.locator(".scores").first.locator("tbody tr")
    assert [text.split()[:2] for text in models.all_inner_texts()] == [["1", "quiet"], ["2", "loud"]]
    assert seen.page.locator("main h2").nth(1).inner_text() == "loud on probe"
    models.first.locator("button").click()
    assert seen.page.locator("main h2").nth(1).inner_text() == "quiet on probe"
    for width in (360, 1000):
        seen.page.set_viewport_size({"width": width, "height": 900})
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.complaints == []
