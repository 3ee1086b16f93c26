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
from report_examples import HOSTILE, angle, blocks, leaves, pair, several, side, similarity, stages

import sosie.report.contents
from sosie.report import write_report
from sosie.report.contents import contents, rounded
from sosie.report.page import render
from sosie.results import Comparison

PAGE = Path(sosie.report.contents.__file__).with_name("page")


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_the_matrix_row_by_row():
    comparison = pair(stages(3), stages(5))
    found = data_of(render(comparison))["pairs"][0]["measures"][0]
    value = np.array(found["value"], dtype=float).reshape(3, 5)
    np.testing.assert_allclose(value, comparison.matrix("debiased_cka"), atol=5.1e-5)
    np.testing.assert_allclose(np.array(found["low"]).reshape(3, 5), comparison["debiased_cka"].low, atol=5.1e-5)


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
    spread = {"low": value * 0.97, "high": value * 1.013, "null": value * 0.031}
    values = {name: similarity(value + k / 7, **spread) for k, name in enumerate(("one", "two", "three"))}
    comparison = Comparison(side("a", leaves(126)), side("b", leaves(126)), values)
    assert write_report(comparison, tmp_path / "big.html").stat().st_size < 2_000_000


def test_rounding_keeps_what_can_be_seen():
    array = np.array([[0.123449, -0.5, 1.0], [1234.567, np.nan, np.inf]])
    assert rounded(array) == [0.1234, -0.5, 1, 1234.6, None, None]
    assert rounded(np.array([[1.23456e-6, 4e-7]])) == [1.235e-6, 4e-7]
    assert rounded(np.array([[-1e-9, 0.5]])) == [0, 0.5]


def test_several_models_share_names_and_say_what_was_left_out(monkeypatch):
    found = contents(several(4, 6))
    assert len(found["pairs"]) == 6
    assert len(found["sides"]) == 4
    assert len(found["records"]) == 1
    assert found["pairs"][0]["measures"][0]["dropped"] == []
    assert np.array(found["models"][0]["value"]).reshape(4, 4)[1, 2] == pytest.approx(found["models"][0]["value"][9])
    monkeypatch.setattr(sosie.report.contents, "MOST_NUMBERS", 10)
    brief = contents(several(4, 6))
    assert brief["pairs"][0]["measures"][0]["dropped"] == ["low", "high"]
    assert "low" not in brief["pairs"][0]["measures"][0]


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
        "import sys, sosie.report; seen = set(sys.modules)\n"
        "assert not seen & {'jinja2', 'matplotlib', 'rich', 'torch'}, seen\n"
        "from sosie.report import write_report, print_comparison\n"
        "assert not set(sys.modules) & {'matplotlib', 'torch'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_down_measures_turn_the_scale_round():
    comparison = Comparison(side("a", ["x"]), side("b", ["y"]), {"angle": angle(np.array([[0.5]]))})
    measure = data_of(render(comparison))["pairs"][0]["measures"][0]
    assert measure["full"] == [pytest.approx(np.pi / 2), 0]
