"""`sosie stitch` as a user meets it."""

from __future__ import annotations

from pathlib import Path

from test_cli import MODELS, run

import sosie
from sosie.data import open_data


def test_stitch(tmp_path: Path) -> None:
    found = run("stitch", *MODELS, "--site", "relu2", "--data", "demo", "--max-rows", "128", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "least_squares from relu2 of A to relu2 of B" in found.stdout
    fitted = sosie.stitch(MODELS[0], "relu2", MODELS[1], "relu2", open_data("demo", split="train", limit=128))
    expected = fitted.evaluate(open_data("demo", limit=128))
    assert f"{expected['agreement_b']:.4g}" in found.stdout
    wrong = run("stitch", *MODELS, "--site", "rilu2", "--data", "demo", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "relu2" in wrong.stderr
