"""`sosie.extract`: a file of rows, from which comparisons are those of the models."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import sosie
from sosie.capture import open_activations
from sosie.cli.main import app
from sosie.files import DamagedFile
from sosie.models import small_cnn


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return small_cnn(), small_cnn()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(150, 1, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rows", ["flatten", "mean", "positions"])
def test_comparing_files_is_comparing_models(models, images, tmp_path: Path, rows: str):
    a, b = models
    options = {"sites": ["conv1", "relu1"] if rows == "positions" else None, "rows": rows}
    files = [
        sosie.extract(m, images, out=tmp_path / f"{n}.safetensors", **options)
        for n, m in zip("ab", models, strict=True)
    ]
    measures = ["debiased_cka", "linear_cka", "procrustes_angle"]
    of_models = sosie.compare(a, b, images, measures=measures, **options)
    of_files = sosie.compare(*files, measures=measures)
    mixed = sosie.compare(files[0], b, images, measures=measures, **options)
    assert of_files.sites_a == mixed.sites_a == of_models.sites_a
    assert of_files.rows_rule == mixed.rows_rule == rows
    for name in measures:
        for other in (of_files, mixed):
            assert np.abs(other.matrix(name) - of_models.matrix(name)).max() < 1e-6
            assert other.values[name].n == of_models.values[name].n
            assert (other.values[name].low is None) == (of_models.values[name].low is None)


def test_the_file_says_what_it_holds(models, images, tmp_path: Path):
    path = sosie.extract(
        models[0], DataLoader(images, 40), out=tmp_path / "a.safetensors", rows="mean", max_rows=100, name="base"
    )
    saved = open_activations(path)
    assert saved.n == 100
    assert [site.label for site in saved.sites][:3] == ["conv1", "relu1", "pool1"]
    assert saved.about["rows"] == "mean"
    assert saved.about["max_rows"] == 100
    assert saved.about["model"].startswith("base: Sequential, 38,314 parameters")
    result = sosie.compare(path, path)
    assert result.side_a.name == "base (A)"
    assert "saved activations of base: Sequential" in result.provenance["models"][0]
    with safe_open(path, framework="np") as file:  # any reader of safetensors
        y = models[0][0](images[:100]).mean((2, 3)).detach().numpy()
        assert np.abs(file.get_tensor("conv1") - y).max() < 1e-6


def test_data_of_unknown_length(models, images, tmp_path: Path):
    path = sosie.extract(models[0], (part for part in images.split(64)), out=tmp_path / "a.safetensors", sites="relu1")
    assert open_activations(path).n == 150


def test_float16_is_half_the_file_and_nearly_the_values(models, images, tmp_path: Path):
    whole = sosie.extract(models[0], images, out=tmp_path / "whole.safetensors")
    half = sosie.extract(models[0], images, out=tmp_path / "half.safetensors", dtype="float16")
    assert half.stat().st_size < 0.51 * whole.stat().st_size
    assert sosie.compare(half, whole).matrix("debiased_cka").diagonal() == pytest.approx(1, abs=1e-4)


def test_nothing_is_left_of_a_pass_that_fails(models, images, tmp_path: Path):
    bad = images.clone()
    bad[120] = float("nan")
    with pytest.raises(ValueError, match=r"site 'conv1' of Sequential, inputs .* are NaN or infinite"):
        sosie.extract(models[0], bad, out=tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"too large for torch.float16; use dtype='bfloat16'"):
        sosie.extract(models[0], images * 1e6, out=tmp_path / "a.safetensors", dtype="float16")
    assert os.listdir(tmp_path) == []


def test_memory_does_not_grow_with_rows(models, images, tmp_path: Path, monkeypatch):
    """No more than one chunk of rows of one site is ever held."""
    from sosie.engine import extracting

    sizes = []
    stored = extracting._stored
    monkeypatch.setattr(extracting, "_stored", lambda *a: (made := stored(*a), sizes.append(len(made)))[0])
    sosie.extract(models[0], (images[:32] for _ in range(20)), out=tmp_path / "a.safetensors")
    assert max(sizes) <= 32
    assert open_activations(tmp_path / "a.safetensors").n == 640


def test_other_rows_cannot_be_made_of_extracted_ones(models, images, tmp_path: Path):
    path = sosie.extract(models[0], images, out=tmp_path / "a.safetensors", rows="mean")
    with pytest.raises(ValueError, match="rows made by 'mean', from which rows='last' cannot be made"):
        sosie.compare(path, path, rows="last")
    assert sosie.compare(path, models[1], images, rows_b="flatten").rows_rule == "mean and flatten"


def test_a_changed_file_is_damaged(models, images, tmp_path: Path):
    path = sosie.extract(models[0], images, out=tmp_path / "a.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match="checksum"):
        sosie.compare(path, path)


def test_wrong_calls(models, images, tmp_path: Path):
    with pytest.raises(ValueError, match=r"written as .safetensors"):
        sosie.extract(models[0], images, out=tmp_path / "a.npz")
    with pytest.raises(ValueError, match="dtype must be one of 'float16'"):
        sosie.extract(models[0], images, out=tmp_path / "a.safetensors", dtype="float8")
    with pytest.raises(TypeError, match="needs data"):
        sosie.extract(models[0], None, out=tmp_path / "a.safetensors")


def test_inputs_of_different_lengths_have_no_common_array(tmp_path: Path):
    batches = [torch.randn(4, 5, 6), torch.randn(4, 7, 6)]
    model = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(ValueError, match="5 positions per input at first and 7 now"):
        sosie.extract(model, batches, out=tmp_path / "a.safetensors", rows="positions")
    path = sosie.extract(model, batches, out=tmp_path / "a.safetensors", rows="mean")
    assert open_activations(path).n == 8


def test_extract_on_the_command_line(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        call = ["extract", f"net{seed}=small_cnn(seed={seed})", "--data", "demo", "--max-rows", "64"]
        made = CliRunner().invoke(app, [*call, "--out", f"{seed}.safetensors", "--rows", "mean"])
        assert made.exit_code == 0, made.output
        assert "12 sites, 64 inputs, rows made by mean" in made.output
    compared = CliRunner().invoke(app, ["compare", "1.safetensors", "2.safetensors", "--out", "c.json"])
    assert compared.exit_code == 0, compared.output
    assert sosie.load("c.json").side_a.name == "net1"


def test_rows_of_other_inputs_are_paired_with_a_caveat(models, images, tmp_path: Path):
    def differ(a, b, *data) -> bool:
        c = sosie.compare(a, b, *data, measures="linear_cka", rows_b=None if data else "flatten")
        return any("paired by position" in text for text in c.rows()[0]["caveats"])

    first, same, turned = (
        sosie.extract(model, data, out=tmp_path / f"{name}.safetensors")
        for name, model, data in (
            ("first", models[0], images.split(50)),
            ("same", models[1], [(x, torch.zeros(len(x))) for x in images.split(64)]),
            ("turned", models[1], images.flip(0)),
        )
    )
    assert not differ(first, same)
    assert differ(first, turned)
    assert not differ(first, models[1], images)
    assert differ(first, models[1], DataLoader(images, 50, shuffle=True))
