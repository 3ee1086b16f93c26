"""The page as a file: what is in it, and that nothing in it can act."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_examples import (
    HOSTILE,
    angle,
    blocks,
    doubted,
    leaves,
    pair,
    several,
    side,
    similarity,
    stages,
    with_chance,
)

import sosie.report.comparison
import sosie.report.page
from sosie.report import write_report
from sosie.report.comparison import contents, render
from sosie.report.page import packed
from sosie.results import ARRAYS, Comparison, Comparisons

PAGE = Path(sosie.report.page.__file__).with_name("page")


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def unpacked(text: str, *shape: int) -> np.ndarray:
    raw = base64.b64decode(text)
    return np.frombuffer(raw, "<f4" if len(raw) == 4 * np.prod(shape) else "<f8").reshape(shape)


def test_the_page_holds_the_matrix_row_by_row():
    comparison = pair(stages(3), stages(5))
    found = data_of(render(comparison))["pairs"][0]["measures"][0]
    np.testing.assert_allclose(unpacked(found["value"], 3, 5), comparison.matrix("debiased_cka"), rtol=1e-7)
    np.testing.assert_allclose(unpacked(found["low"], 3, 5), comparison["debiased_cka"].low, rtol=1e-7)


def test_title_and_sentences_lead_the_page():
    comparison = pair(stages(4), stages(4))
    text = html.unescape(render(comparison))
    assert "<title>resnet20 and resnet56</title>" in text
    assert text.index("By debiased_cka, resnet20") < text.index("By procrustes_angle") < text.index("By mutual_knn")


def test_the_policy_admits_its_own_script_and_style_and_nothing_else():
    text = render(pair(stages(2), stages(2)))
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_page_refers_to_nothing_outside_itself():
    text = render(pair(stages(4), stages(4)))
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,"}
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}


def hostile() -> Comparison:
    plain = pair(HOSTILE, HOSTILE[::-1], names=(HOSTILE[0], HOSTILE[1]))
    values = {HOSTILE[0]: plain["debiased_cka"], HOSTILE[2]: plain["mutual_knn"]}
    provenance = {text: {"nested": [text, {"deeper": text}]} for text in HOSTILE}
    return Comparison(plain.side_a, plain.side_b, values, rows_rule=HOSTILE[1], provenance=provenance)


def test_hostile_text_stays_text():
    text = render(hostile())
    assert len(re.findall(r"<script\b", text)) == len(re.findall(r"</script\b", text)) == 2
    assert not re.search(r"<(img|svg|b)\b", text)
    assert not set("\u2028\u2029\u202e\x1b\x07") & set(text)
    assert "{{7*7}}" in text
    text.encode("utf-8")  # half characters would raise
    names = data_of(text)["sides"][0]["sites"]
    assert names[0] == HOSTILE[0]
    assert names[4] == "right<U+202E>to left"
    assert names[6] == "(no name)"


def test_scripts_never_parse_data_as_markup():
    for script in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script.read_text()
        )


def test_two_resnet50s_fit_in_two_megabytes(tmp_path):
    value = blocks(126, 126)
    values = {name: with_chance(similarity(value + k / 7), value * 0.031) for k, name in enumerate(("one", "two"))}
    packed = [kind for kind in ARRAYS if kind != "block_error"]  # which is in a caveat
    assert all(getattr(found, kind) is not None for found in values.values() for kind in packed)
    comparison = Comparison(side("a", leaves(126)), side("b", leaves(126)), values)
    assert write_report(comparison, tmp_path / "big.html").stat().st_size < 2_000_000


def test_numbers_of_any_size_are_packed_to_seven_digits():
    for array in ([[0.62349999, -0.5, 1.0], [1234.567, 1e-9, 0.0]], [[1e300, -1e-300, 0.1], [3.0, 1e38, 7.0]]):
        np.testing.assert_allclose(unpacked(packed(np.array(array)), 2, 3), array, rtol=1e-7)
    assert len(packed(np.ones((3, 4)))) == 3 * 4 * 4 * 4 / 3
    assert np.isnan(unpacked(packed(np.array([[np.nan, np.inf, 1.0]])), 1, 3)).tolist() == [[True, True, False]]


def test_scores_have_a_scale_of_their_own():
    found = contents(doubted(stages(4), stages(4)))["pairs"][0]["measures"]
    for measure in found[:2]:  # whichever way the measure runs, a score of 1 is the same
        assert measure["calibrated"]["full"] == [0, 1]
        assert measure["calibrated"]["closer"] == "up"
    assert found[2]["calibrated"] is None  # same is not known
    assert [measure["correction"] for measure in found] == [
        "corrected for the search",
        "not corrected for the search",
        "corrected for the search",
    ]
    assert contents(pair(stages(4), stages(4)))["pairs"][0]["measures"][1]["correction"] is None


def test_several_models_share_names_and_say_what_was_left_out(monkeypatch):
    found = contents(several(4, 6))
    assert len(found["pairs"]) == 6
    assert len(found["sides"]) == 4
    assert len(found["records"]) == 1
    assert found["pairs"][0]["measures"][0]["dropped"] == []
    models = unpacked(found["models"][0]["value"], 4, 4)
    np.testing.assert_allclose(models, several(4, 6).matrix("debiased_cka"), rtol=1e-7)
    monkeypatch.setattr(sosie.report.comparison, "MOST_NUMBERS", 10)
    brief = contents(several(4, 6))
    assert brief["pairs"][0]["measures"][0]["dropped"] == ["low", "high"]
    assert "low" not in brief["pairs"][0]["measures"][0]
    chance = doubted(stages(4), stages(4))
    brief = contents(Comparisons(("a", "b"), {(0, 1): chance}))["pairs"][0]["measures"][0]
    assert brief["dropped"] == ["low", "high", "null", "null_spread"]
    assert brief["calibrated"] is None
    assert {"p", "p_search"} <= set(brief)  # they decide how cells look


def test_a_page_for_one_site_and_for_undefined_values():
    lonely = Comparison(side("a", ["x"]), side("b", ["y"]), {"m": similarity(np.full((1, 1), np.nan))})
    assert data_of(render(lonely))["pairs"][0]["measures"][0]["best"] == [None]
    assert "Nothing was measured" in render(Comparison(side("a", ["x"]), side("b", ["y"]), {}))


def test_the_result_must_be_a_result(tmp_path):
    with pytest.raises(TypeError, match="not a dict"):
        write_report({}, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


def test_report_needs_neither_torch_nor_what_is_not_asked_for():
    code = (
        "import sys\n"
        "from sosie.report import write_report, print_comparison, plot_heatmap\n"
        "assert not set(sys.modules) & {'jinja2', 'matplotlib', 'torch'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_down_measures_turn_the_scale_round():
    comparison = Comparison(side("a", ["x"]), side("b", ["y"]), {"angle": angle(np.array([[0.5]]))})
    measure = data_of(render(comparison))["pairs"][0]["measures"][0]
    assert measure["full"] == [pytest.approx(np.pi / 2), 0]


def single(**facts: object) -> Comparison:
    """Outputs of two models, by a similarity and a distance."""
    one, none = np.array([[0.8]]), np.array([[0.2]])
    alike = similarity(one, doubt=False, low=one - 0.1, high=one + 0.1, null=none, null_spread=none / 10, **facts)
    apart = similarity(none, doubt=False, closer="down", bounds=(0.0, 1.0), same=0.0, null=one, null_spread=one / 10)
    return Comparison(
        side("a", ["output"]), side("b", ["output"]), {"agreement": alike, "churn": apart}, "outputs", kind="outputs"
    )


def test_the_meaning_of_a_measure_and_its_paper_are_on_the_page() -> None:
    found = single(meaning="Share of </script> answers.", paper="klabunde2025, nobody1999")
    page = render(found)
    assert "Share of \\u003c/script\\u003e answers." in page
    assert "https://arxiv.org/abs/2305.06329" in page
    assert "nobody1999" not in page.partition("Provenance")[0]
    assert '<h1 dir="auto">Outputs of a and b</h1>' in page


@pytest.mark.browser
@pytest.mark.parametrize("width", [420, 1400])
def test_one_site_has_one_table_of_all_measures(look, width: int) -> None:
    seen = look(single(meaning="Share of equal answers.", paper="klabunde2025"), width=width)
    assert seen.page.locator("svg.heatmap, svg.curve, [role=tab]").count() == 0
    assert seen.page.locator("table.layers tbody tr").count() == 2
    assert seen.page.locator("a[href='https://arxiv.org/abs/2305.06329']").inner_text() == "Klabunde et al. 2025"
    dots = [float(dot.get_attribute("cx")) for dot in seen.page.locator(".track-dot").all()]
    assert dots == pytest.approx([6 + 138 * 0.75] * 2, abs=0.01)  # both three quarters of the way from chance
    assert "0.700 to 0.900" in seen.page.locator("table.layers").inner_text()
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.requests == [seen.path.as_uri()]
    assert seen.complaints == []
