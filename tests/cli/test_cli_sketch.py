"""`sosie sketch` and `sosie transfer` as a user meets them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_cli import MODELS, run_here

import sosie
from sosie.cli.main import app
from sosie.data import open_data
from sosie.results import Comparison, Comparisons
from sosie.sketching import Sketch

SHORT = ("--data", "demo", "--sites", "relu2,fc", "--max-rows", "96")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sketches of two models, with one seed; of the first also with another."""
    path = tmp_path_factory.mktemp("sketches")
    for name, model, seed in (("a", MODELS[0], 0), ("b", MODELS[1], 0), ("c", MODELS[1], 1)):
        made = sosie.sketch(model, open_data("demo"), sites=["relu2", "fc"], size=64, max_rows=96, seed=seed)
        made.save(path / f"{name}.safetensors")
    return path


def test_sketch_tells_what_it_kept(folder: Path, tmp_path: Path) -> None:
    found = run_here("sketch", MODELS[0], *SHORT, "--size", "64", "--out", "k.safetensors", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    kept = Sketch.load(tmp_path / "k.safetensors")
    for text in ("2 sites, 96 rows in 64 buckets, seed 0", "features, gradients, hadamard", "logits", "peak memory"):
        assert text in found.stdout, text
    assert f"{kept.bytes / 2**20:.1f} MiB" in found.stdout
    same = Sketch.load(folder / "a.safetensors")
    np.testing.assert_allclose(kept.site("fc").features.rows, same.site("fc").features.rows, rtol=1e-5)  # type: ignore[union-attr]


def test_parts_are_merged(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(
        "from sosie.data import open_images\n"
        "def first():\n    return open_images('demo').read(0, 40)[0].split(20)\n"
        "def rest():\n    return open_images('demo').read(40, 96)[0].split(20)\n"
    )
    for part, start in (("first", "0"), ("rest", "40")):
        data = ("--data", f"half.py:{part}", "--sites", "relu2,fc", "--size", "64", "--first-row", start)
        found = run_here("sketch", MODELS[0], *data, "--out", f"{part}.safetensors", cwd=tmp_path)
        assert found.returncode == 0, found.stderr
    merged = run_here(
        "sketch", "--merge", "rest.safetensors", "first.safetensors", "--out", "k.safetensors", cwd=tmp_path
    )
    assert merged.returncode == 0, merged.stderr
    assert "96 rows" in merged.stdout
    kept, whole = Sketch.load(tmp_path / "k.safetensors"), Sketch.load(folder / "a.safetensors")
    kept.check_shared(whole)
    np.testing.assert_allclose(
        kept.kernel("fc").gram, whole.kernel("fc").gram, atol=1e-4 * whole.kernel("fc").gram.max()
    )
    again = run_here("sketch", "--merge", "k.safetensors", "first.safetensors", "--out", "l.safetensors", cwd=tmp_path)
    assert again.returncode == 1
    assert "overlap" in again.stderr
    assert "first.safetensors" in again.stderr


def test_sketches_are_compared(folder: Path, tmp_path: Path) -> None:
    files = [str(folder / f"{name}.safetensors") for name in "abc"]
    options = ("--kernel", "features", "--measures", "linear_cka,debiased_cka", "--out", str(tmp_path / "c.json"))
    found = run_here("compare", *files[:2], *options)
    assert found.returncode == 0, found.stderr
    c = sosie.load(tmp_path / "c.json")
    assert isinstance(c, Comparison)
    expected = sosie.compare(
        *(Sketch.load(path).using("features") for path in files[:2]), measures=["linear_cka", "debiased_cka"]
    )
    assert isinstance(expected, Comparison)
    np.testing.assert_array_equal(c.matrix("debiased_cka"), expected.matrix("debiased_cka"))
    apart = run_here("compare", files[0], files[2], "--unpaired")
    assert apart.returncode == 0, apart.stderr
    for text in ("linear_cka", "spectral_bures_distance", "share no rows"):
        assert text in apart.stdout, text
    independent = run_here("compare", files[0], files[2])
    assert independent.returncode == 1
    assert "--unpaired" in independent.stderr


def test_transfer(folder: Path, tmp_path: Path) -> None:
    files = ("--out", "t.json", "--html", "t.html")
    found = run_here("transfer", *MODELS, *SHORT, "--size", "64", *files, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    t = sosie.load(tmp_path / "t.json")
    assert isinstance(t, Comparisons)
    means = {c.side_a.name: c.matrix("mean_embedding").mean() for c in t}
    order = sorted(means, key=lambda name: means[name])
    assert f"{order[0]} has the least to adapt (mean_embedding {means[order[0]]:.3g}" in " ".join(found.stdout.split())
    assert "reads this both ways" in " ".join(found.stdout.split())
    page = (tmp_path / "t.html").read_text("utf-8")
    assert "How much is there to adapt?" in page
    assert "has the least to adapt" in page
    one = run_here("transfer", str(folder / "a.safetensors"), "--full")
    assert one.returncode == 0, one.stderr
    lines = [line.split() for line in one.stdout.splitlines() if line.strip().startswith(("1 relu2", "2 fc"))]
    embedding = t["small_cnn-seed0", "demo-test"].matrix("mean_embedding")[:, 0]
    assert [line[1] for line in lines] == [("relu2", "fc")[k] for k in np.argsort(embedding)]
    assert float(lines[0][2]) == pytest.approx(embedding.min(), rel=5e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sketch", "small_cnn", "--out", "k.safetensors"], "--data"),
        (["sketch", "small_cnn", "small_cnn", "--data", "demo", "--out", "k.safetensors"], "--merge"),
        (["sketch", "small_cnn", "--data", "demo", "--out", "k.npz"], ".safetensors"),
        (["sketch", "small_cnn", "--data", "demo", "--size", "many", "--out", "k.safetensors"], "or all"),
        (["sketch", "A", "--data", "demo", "--out", "k.safetensors"], "already"),
        (["sketch", "--merge", "A", "--out", "k.safetensors"], "two sketches"),
        (["sketch", "--merge", "A", "B", "--first-row", "3", "--out", "k.safetensors"], "--first-row"),
        (["sketch", "--merge", "A", "B", "--out", "k.safetensors"], "one model"),
        (["compare", "A", "small_cnn"], "not with small_cnn"),
        (["compare", "A", "B", "--data", "demo", "--exact"], "--data, --exact"),
        (["compare", "A", "--unpaired"], "two sketches"),
        (["compare", "small_cnn", "small_cnn", "--unpaired"], "small_cnn"),
        (["compare", "small_cnn", "small_cnn", "--data", "demo", "--kernel", "features"], "sketches only"),
        (["transfer", "small_cnn"], "--data"),
        (["transfer", "A", "--beta", "0.3"], "leave them out"),
    ],
)
def test_what_does_not_go_together_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {name.upper(): str(folder / f"{name}.safetensors") for name in "ab"}
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        app([files.get(word, word) for word in arguments], standalone_mode=False)
    assert not list(tmp_path.iterdir())
