"""Claims are ranges: an interval lies inside, outside or across, and a setting can decide that or not."""

from __future__ import annotations

import json
from pathlib import Path

import paper_scripts  # noqa: F401
import pytest
from typer.testing import CliRunner

from sosie.cli.main import app

from claims import Claim, Setting, between, check_claims, count, read_claims, read_settings, table  # isort: skip
from scatter import Interval, of_mean, of_resampled, of_share  # isort: skip

EXPECTED = """
[both]
says = "Between."
measured = "one/x"
low = 0.2
high = 0.4
kind = "number"

[only-high]
says = "Small."
measured = "one/y"
high = 0.0
kind = "quality"
exact = "a count"

[elsewhere]
says = "Never run."
measured = "two/x"
low = 1
kind = "ours"
"""


def paper(folder: Path, text: str = EXPECTED) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "expected.toml").write_text(text)
    (folder / "intervals.py").write_text(
        "from scatter import Interval\n\n\ndef intervals(read):\n"
        "    around = read('one').get('around')\n"
        "    return {'one/x': Interval(*around, '3 seeds', 3) if around else None}\n"
    )
    return folder


def write(folder: Path, x: float | None, y: float, around: tuple[float, float] | None = None) -> None:
    (folder / "results").mkdir(exist_ok=True)
    found = {"numbers": {"x": x, "y": y}, "around": around}
    (folder / "results" / "one.json").write_text(json.dumps(found))


def judged(folder: Path) -> list[str]:
    return [found["outcome"] for found in check_claims(folder, folder / "results")]


CLAIM = Claim("c", "Between.", "one/x", 0.2, 0.4, "number")
FAR = Setting({"epochs": [12, 160]}, "neither", "12 epochs of 160", "160 epochs")


@pytest.mark.parametrize(
    ("value", "interval", "setting", "outcome", "reason"),
    [
        (0.3, (0.25, 0.35), None, "reproduced", "inside, 3 seeds"),
        (0.3, (0.15, 0.35), None, "undecided", "across 0.2 to 0.4, 3 seeds, which would show 0.143; needs about 4"),
        (0.3, (0.15, 0.35), FAR, "undecided", "needs 160 epochs"),
        (0.5, (0.45, 0.55), None, "contradicted", "outside, 3 seeds"),
        (0.5, (0.45, 0.55), FAR, "undecided", "outside, 3 seeds, but 12 epochs of 160; needs 160 epochs"),
        (0.3, (0.25, 0.35), FAR, "undecided", "inside, 3 seeds, but 12 epochs of 160; needs 160 epochs"),
        (0.3, (0.25, 0.35), Setting(FAR.distance, "reproduction", "worse"), "reproduced", "inside, 3 seeds"),
        (0.5, (0.45, 0.55), Setting(FAR.distance, "reproduction", "worse"), "undecided", "but worse"),
        (0.3, (0.25, 0.35), Setting(FAR.distance, "contradiction", "easier"), "undecided", "but easier"),
        (0.5, (0.45, 0.55), Setting(FAR.distance, "both", "it helps"), "contradicted", "outside, 3 seeds; it helps"),
        (0.3, None, None, "undecided", "one measurement without scatter; needs more runs"),
        (None, None, None, "not run", "no results"),
    ],
)
def test_the_four_outcomes(
    value: float | None, interval: tuple[float, float] | None, setting: Setting | None, outcome: str, reason: str
) -> None:
    found = CLAIM.judge(value, None if interval is None else Interval(*interval, "3 seeds", 3), setting)
    assert found.outcome == outcome
    assert reason in found.reason


def test_a_value_in_the_range_is_not_enough() -> None:
    """A loss of .18 is within half a point of a gain of .21; with its scatter it says nothing."""
    gain = Claim("gain", "Gains .21.", "one/x", -0.29, 0.71, "number")
    assert gain.judge(-0.18, Interval(-1.1, 0.74, "1 seed", 1)).outcome == "undecided"
    assert gain.judge(-0.18, Interval(-0.2, -0.16, "many seeds", 1000)).outcome == "reproduced"


def test_an_exact_number_needs_no_interval() -> None:
    exact = Claim("c", "Between.", "one/x", 0.2, 0.4, "number", exact="a count")
    assert [exact.judge(value).outcome for value in (0.2, 0.4, 0.41)] == ["reproduced", "reproduced", "contradicted"]


def test_a_control_of_our_own_is_about_our_own_run() -> None:
    ours = Claim("c", "Between.", "one/x", 0.2, 0.4, "ours")
    assert ours.judge(0.5, Interval(0.45, 0.55, "3 seeds"), FAR).outcome == "contradicted"


def test_a_claim_has_a_word_of_its_own_about_the_setting() -> None:
    despite = Claim("c", "Between.", "one/x", 0.2, 0.4, "number", decides="both", because="by construction")
    found = despite.judge(0.5, Interval(0.45, 0.55, "3 seeds"), FAR)
    assert (found.outcome, found.reason) == ("contradicted", "outside, 3 seeds; by construction")


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paper(tmp_path)
    assert judged(folder) == ["not run"] * 3
    write(folder, 0.3, 0.1, (0.2, 0.4))
    assert judged(folder) == ["reproduced", "contradicted", "not run"]
    write(folder, 0.3, -0.1, (0.19, 0.4))
    assert judged(folder) == ["undecided", "reproduced", "not run"]
    write(folder, None, 0.0)  # an experiment that could not tell
    assert judged(folder) == ["not run", "reproduced", "not run"]
    assert "the paper's: 1 reproduced, 0 contradicted, 0 undecided, 1 not run" in capsys.readouterr().out
    write(folder, 0.5, 0.0, (0.45, 0.55))
    check_claims(folder, folder / "results")
    stored = json.loads((folder / "results" / "verdicts.json").read_text())
    keys = ("value", "interval_low", "interval_high", "outcome", "reason")
    assert [stored[0][key] for key in keys] == [0.5, 0.45, 0.55, "contradicted", "outside, 3 seeds"]
    assert stored[0]["smallest_effect"] == pytest.approx(0.0715, abs=1e-4)
    assert [stored[1][key] for key in keys[:3]] == [0.0, 0.0, 0.0]


def test_a_number_that_is_judged_twice_counts_once(tmp_path: Path) -> None:
    again = '[again]\nsays = "Above."\nmeasured = "one/x"\nlow = 0.2\nkind = "quality"\n'
    with pytest.raises(ValueError, match=r"one/x is judged by \[both\] too: same_as says so"):
        read_claims(paper(tmp_path, EXPECTED + again) / "expected.toml")
    with pytest.raises(ValueError, match="same_as 'nobody' is no claim"):
        read_claims(paper(tmp_path, EXPECTED + again + 'same_as = "nobody"\n') / "expected.toml")
    folder = paper(tmp_path, EXPECTED + again + 'same_as = "both"\n')
    write(folder, 0.3, 0.1, (0.25, 0.35))
    counts = count(check_claims(folder, folder / "results"))
    assert list(counts["the paper's"].values()) == [1, 1, 0, 0]
    assert list(counts["our own"].values()) == [0, 0, 0, 1]


def test_the_table_and_its_place(tmp_path: Path) -> None:
    added = EXPECTED.replace('kind = "ours"', 'kind = "ours"\nadded = "after the results"')
    folder = paper(tmp_path, added)
    write(folder, 0.3, 0.1, (0.25, 0.35))
    text = table(folder, check_claims(folder, folder / "results"))
    assert "| Between | 0.2 to 0.4 | 0.3 (0.25 to 0.35) | reproduced | inside, 3 seeds |" in text
    assert "| Never run \\* | at least 1 |  | not run | no results |" in text
    assert "- after the results: elsewhere" in text
    page = "a\n<!-- claims: written by papers/claims.py -->\nold\n<!-- end of claims -->\nb\n"
    assert between(page, "claims", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- counts"):
        between(page, "counts", "new")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('decides = "maybe"\nbecause = "x"', "decides is one of"),
        ('decides = "neither"', "has a reason: because"),
        ('epochs = 12\nbecause = "x"', "ours and the paper's, two values"),
    ],
)
def test_a_setting_that_says_too_little_is_refused(tmp_path: Path, text: str, told: str) -> None:
    folder = paper(tmp_path, f"[settings.one]\n{text}\n{EXPECTED}")
    with pytest.raises(ValueError, match=told):
        read_settings(folder / "expected.toml")


def test_intervals() -> None:
    found = of_mean([1.0, 2.0, 3.0], "seeds")
    assert found is not None
    assert (found.low, found.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)  # 2 ± 4.3027 / √3
    assert of_mean([1.0], "seeds") is None
    share = of_share(0.9, 10, "sites")
    assert (share.low, share.high) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # R: prop.test(9, 10, correct = FALSE)
    drawn = of_resampled([0.0, 1.0, 2.0, 3.0], lambda units: sum(units) / len(units), "seeds")
    assert drawn is not None
    assert drawn == of_resampled([0.0, 1.0, 2.0, 3.0], lambda units: sum(units) / len(units), "seeds")
    assert 0 < drawn.low < 1.5 < drawn.high < 3


def test_a_number_that_is_missing_is_no_verdict(tmp_path: Path) -> None:
    folder = paper(tmp_path)
    (folder / "results").mkdir()
    (folder / "results" / "one.json").write_text(json.dumps({"numbers": {"z": 1.0}}))
    with pytest.raises(KeyError, match="no number 'x'; it has z"):
        judged(folder)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("low = 0.2\nhigh = 0.4\n", "low or high"),
        ('kind = "number"', "low or high"),
        ("high = 0.4", "low or high"),
        ('"number"', "kind is one of"),
    ],
)
def test_a_claim_that_says_too_little_is_refused(tmp_path: Path, wrong: str, told: str) -> None:
    better = {"high = 0.4": "hihg = 0.4", '"number"': '"certain"'}.get(wrong, "")
    folder = paper(tmp_path, EXPECTED.replace(wrong, better, 1))
    with pytest.raises(ValueError, match=told):
        read_claims(folder / "expected.toml")


def test_the_verb_lists_and_runs(tmp_path: Path) -> None:
    folder = paper(tmp_path / "made-up")
    write(folder, 0.3, 1.0, (0.25, 0.35))
    asked = ["papers", "--folder", str(tmp_path)]
    assert "3 claims, not run yet" in CliRunner().invoke(app, asked).stdout
    judged(folder)
    told = "2 of the paper: 1 reproduced, 1 contradicted; 1 of our own: 1 not run"
    assert told in CliRunner().invoke(app, asked).stdout
    (folder / "run.py").write_text("import sys; sys.exit(7 if sys.argv[1:] == ['--only', 'x'] else 8)")
    assert CliRunner().invoke(app, [*asked, "made-up", "--only", "x"]).exit_code == 7
    missing = CliRunner().invoke(app, [*asked, "nobody"])
    assert "there are made-up" in str(missing.exception)
