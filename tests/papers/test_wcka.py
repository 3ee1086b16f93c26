"""Every experiment of the wCKA paper runs, on a handful of images; what is written down of it fits together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sosie.data import open_images

PAPERS = Path(__file__).resolve().parents[2] / "papers"
PAPER = PAPERS / "wcka"
sys.path.insert(0, str(PAPERS))

from claims import read_claims, read_number  # noqa: E402

VERDICTS = PAPER / "results" / "verdicts.json"
after_the_run = pytest.mark.skipif(not VERDICTS.is_file(), reason="the paper's run has not been made yet")


def run(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_smoke_run(tmp_path: Path) -> None:
    try:
        for split in ("train", "test"):
            open_images("mnist", split=split, limit=1)
    except FileNotFoundError as error:
        pytest.skip(f"MNIST is not at hand: {error}")
    results = tmp_path / "results"
    run(str(PAPER / "run.py"), "--small", "--device", "cpu", "--results", str(results), SOSIE_WORKERS="0")
    verdicts = {each["name"]: each for each in json.loads((results / "verdicts.json").read_text())}
    measured = {each["measured"].partition("/")[0] for each in verdicts.values()}
    stored = {path.stem for path in results.glob("*.json")} - {"verdicts"}
    assert measured == stored  # each experiment has a claim, and each claim an experiment
    # Theorems hold even here: wCKA keeps its value under symmetries, and does not see the order of classes.
    for name in ("invariance", "blind-rolled", "blind-biased", "figure-1a-wcka-random"):
        assert verdicts[name]["verdict"] == "reproduced", verdicts[name]
    kept = run(str(PAPER / "run.py"), "--small", "--resume", "--only", "networks", "--results", str(results))
    assert "networks: kept" in kept
    run(str(PAPER / "afterwards.py"), "--small", "--device", "cpu", "--results", str(results), SOSIE_WORKERS="0")
    again, first = (json.loads((results / f"{name}.json").read_text()) for name in ("afterwards", "figure-3"))
    for kind, parts in again["pairs"].items():  # the same networks, so the same numbers
        assert parts["all"]["pairs"] == parts["both learnt"]["pairs"] + parts["one did not"]["pairs"]
        own = first["correlations"]["wcka"][kind]["groups"]["all"]["pearson"]["value"]
        assert parts["all"]["all"]["pearson"]["values"]["wcka"] == pytest.approx(own)
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    drawn = run(str(PAPER / "draw.py"), str(results)).splitlines()
    assert {Path(path).stem for path in drawn} == stored | {"afterwards"}


def test_the_real_run_is_kept_under_what_it_was_asked_for() -> None:
    """The smoke run names its corruptions one by one, so it cannot tell."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(PAPER)!r})\n"
        "from pathlib import Path; from settings import Settings\n"
        "full = Settings('cpu', Path('r'), Path('c'), 0); hash(full)\n"
        "print(len(json.loads(json.dumps([full.scratch.facts(), full.heads.facts()]))[0]['corruptions']))"
    )
    assert run("-c", code).strip() == "15"


def test_every_claim_can_fail() -> None:
    claims = read_claims(PAPER / "expected.toml")
    assert len({claim.name for claim in claims}) == len(claims) == 82
    for claim in claims:
        outside = [edge + step for edge, step in ((claim.low, -1.0), (claim.high, 1.0)) if edge is not None]
        assert {claim.judge(value) for value in outside} == {"not reproduced"}


@after_the_run
def test_every_claim_was_judged_by_a_number_that_is_there() -> None:
    verdicts = {each["name"]: each for each in json.loads(VERDICTS.read_text())}
    for claim in read_claims(PAPER / "expected.toml"):
        value = read_number(PAPER / "results", claim.measured)
        assert value is not None
        assert verdicts[claim.name]["value"] == value
        assert verdicts[claim.name]["verdict"] == claim.judge(value)


@after_the_run
def test_the_readme_counts_as_the_verdicts_do() -> None:
    verdicts = [each["verdict"] for each in json.loads(VERDICTS.read_text())]
    text = " ".join((PAPER / "README.md").read_text().split())
    assert f"Of {len(verdicts)} claims" in text
    assert "not fully run" not in text
    assert f"{verdicts.count('reproduced')} were reproduced and {verdicts.count('not reproduced')} were not" in text
