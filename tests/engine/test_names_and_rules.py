"""Names of models, and a row rule for each side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.cli.options import split_names
from sosie.models import small_cnn
from sosie.report import write_report
from sosie.results import rules_of


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return small_cnn(), small_cnn()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(96, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_models_are_named_by_a_dict_or_a_list(models, images, tmp_path: Path, capsys):
    a, b = models
    named = sosie.compare({"base": a, "tuned": b}, images)
    assert repr(named).startswith("<Comparison base (12 sites) x tuned")
    assert [(row["model_a"], row["model_b"]) for row in named.rows()][:1] == [("base", "tuned")]
    assert named.provenance["models"][0].startswith("base: Sequential")
    plain = sosie.compare(a, b, images)
    assert np.array_equal(named.matrix("debiased_cka"), plain.matrix("debiased_cka"))
    assert sosie.compare(a, b, images, names=("base", "tuned")).side_b.name == "tuned"
    assert sosie.load(named.save(tmp_path / "c.json")).side_a.name == "base"
    page = write_report(named, tmp_path / "c.html").read_text()
    assert "base" in page
    assert "tuned" in page
    three = sosie.compare({"base": a, "tuned": b, "again": a}, images)
    assert three["base", "again"].matrix("debiased_cka").diagonal() == pytest.approx(1)


def test_every_comparison_of_models_takes_names(models, images):
    a, b = models
    named = {"base": a, "tuned": b}
    data = [(images, torch.arange(96) % 10)]
    sketches = {name: sosie.sketch(model, images, size=None) for name, model in named.items()}
    results = [
        sosie.compare_outputs(named, images),
        sosie.compare_outputs(a, b, images, names=list(named)),
        sosie.compare_weights(named, measures="weight_cosine"),
        sosie.compare_weights(a, b, measures="weight_cosine", names=list(named)),
        sosie.stitch_sites(named, data, sites_a="relu*", sites_b="relu*"),
        sosie.compare(sketches),
    ]
    for result in results:
        assert (result.side_a.name, result.side_b.name) == ("base", "tuned")
    assert sosie.transfer(named, images).names[:2] == ("base", "tuned")
    assert sosie.transfer(a, images, names=["base"]).side_a.name == "base"
    of_time = sosie.dynamics([a, b], [b, a], data=images, names=("first", "second"))
    assert (of_time.name_a, of_time.name_b) == ("first", "second")
    by_name = sosie.dynamics({"first": [a, b], "second": {0: b, 5: a}}, data=images)
    assert (by_name.name_a, by_name.name_b, by_name.steps_b) == ("first", "second", (0, 5))


def test_a_dict_of_arrays_is_activations_and_of_dicts_named_activations():
    rows = {"relu": torch.rand(32, 4, generator=torch.Generator().manual_seed(0))}
    assert sosie.compare(rows, rows).sites_a == ["relu"]
    assert sosie.compare({"base": rows, "tuned": rows}).side_b.name == "tuned"
    with pytest.raises(TypeError, match=r"models or arrays, not both: 'a' are models .* 'relu' arrays"):
        sosie.compare({"a": small_cnn(), **rows}, rows)


def test_a_named_model_keeps_its_specification_in_the_provenance(images):
    result = sosie.compare({"wide": "small_cnn(seed=1)", "other": "small_cnn(seed=2)"}, images)
    assert result.provenance["models"][0].startswith("wide: small_cnn")


def test_wrong_names_are_refused(models, images):
    a, b = models
    for names, error, text in [
        (("a", "a"), ValueError, "must differ"),
        (("a",), ValueError, "got 1 names"),
        ("ab", TypeError, "list of texts"),
    ]:
        with pytest.raises(error, match=text):
            sosie.compare(a, b, images, names=names)
    with pytest.raises(TypeError, match="keys of the dict"):
        sosie.compare({"a": a, "b": b}, images, names=("a", "b"))
    with pytest.raises(ValueError, match="two models are stitched"):
        sosie.stitch_sites([a, b, a], images)


def test_names_on_the_command_line(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    Path("lr=1/a.npz").touch()
    texts = ["base=tiny10@a.safetensors", "tiny10(seed=1)", "lr=1/a.npz", "x/lr=0.1/w.npz", "tiny10@lr=1.safetensors"]
    specs, names = split_names(texts)
    assert names == ["base", None, None, None, None]
    assert specs == ["tiny10@a.safetensors", *texts[1:]]
    assert split_names(texts[1:]) == (texts[1:], None)


# Rows of each side


class Tokens(nn.Module):
    """Twelve tokens of width 6, the first of which knows nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randn(96, 12, 6, generator=torch.Generator().manual_seed(2))


def test_each_side_has_its_rows(tokens, tmp_path: Path):
    torch.manual_seed(3)
    model = Tokens()
    result = sosie.compare(model, model, tokens, sites="body", rows_a="cls", rows_b="last", measures="linear_cka")
    y = model.body(tokens).detach()
    expected = sosie.measure("linear_cka", y[:, 0], y[:, -1])
    exact = sosie.compare(
        model, model, tokens, sites="body", rows_a="cls", rows_b="last", measures="linear_cka", exact=True
    )
    assert exact.matrix("linear_cka")[0, 0] == pytest.approx(expected, abs=1e-6)
    assert result.rows_rule == "cls and last"
    assert rules_of(result.rows_rule) == ("cls", "last")
    assert "“cls” for A and “last” for B" in write_report(result, tmp_path / "c.html").read_text()
    one_side = sosie.compare(model, model, tokens, sites="body", rows="cls", rows_b="last")
    assert one_side.rows_rule == "cls and last"
    assert sosie.compare(model, model, tokens, sites="body", rows_a="mean", rows_b="mean").rows_rule == "mean"


def test_rows_of_each_side_are_resumed_and_refused_if_they_change(tokens, tmp_path: Path):
    torch.manual_seed(3)
    model, file = Tokens(), tmp_path / "sums.safetensors"
    options = {"sites": "body", "rows_a": "cls", "resume": file}
    first = sosie.compare(model, model, tokens[:64], rows_b="last", **options)
    again = sosie.compare(model, model, tokens, rows_b="last", **options)
    assert again.values["debiased_cka"].n == 96
    assert first.rows_rule == again.rows_rule == sosie.compare(file).rows_rule == "cls and last"
    with pytest.raises(ValueError, match="rows_rule is cls and mean and cls and last"):
        sosie.compare(model, model, tokens, rows_b="mean", **options)


def test_positions_on_both_sides_still_get_no_interval(tokens):
    model = Tokens()
    result = sosie.compare(model, model, tokens, sites="body", rows_a="positions", rows_b="positions")
    assert result.values["debiased_cka"].low is None
    with pytest.raises(ValueError, match="different numbers of them"):
        sosie.compare(model, model, tokens, sites="body", rows_a="positions", rows_b="cls")


def test_rows_for_more_than_two_models_are_one_rule(tokens):
    model = Tokens()
    with pytest.raises(ValueError, match="leave rows_b out"):
        sosie.compare([model] * 3, tokens, rows_b="cls")


def test_maps_of_different_size_meet_on_a_grid() -> None:
    torch.manual_seed(0)
    images = torch.randn(40, 3, 8, 8)
    fine, coarse = nn.Conv2d(3, 5, 3, padding=1), nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"16 per input at .* 64 per input at .* rows='grid\(4\)' averages"):
        sosie.compare(fine, coarse, images, rows="positions")
    c = sosie.compare(fine, coarse, images.split(9), rows="grid(4)", measures=["linear_cka", "mean_cca"])
    with torch.no_grad():
        x = nn.functional.adaptive_avg_pool2d(fine(images), 4).movedim(1, -1).reshape(-1, 5)
        y = coarse(images).movedim(1, -1).reshape(-1, 4)
    for name in c.measures:
        assert c.matrix(name)[0, 0] == pytest.approx(sosie.measure(name, x, y), abs=1e-5)
    assert c.rows_rule == "grid(4)"
    assert any("rows are positions" in caveat for caveat in c.rows()[0]["caveats"])
    mixed = sosie.compare(fine, coarse, images, rows_a="grid(4)", rows_b="positions", measures="linear_cka")
    assert mixed.matrix()[0, 0] == pytest.approx(c.matrix("linear_cka")[0, 0], abs=1e-6)
