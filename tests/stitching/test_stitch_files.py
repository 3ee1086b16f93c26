"""Saved stitches: loaded exactly, for the same models only; damaged files are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import save_file
from nets import cnn
from safetensors import safe_open
from torch import Tensor, nn

import sosie
from sosie.files import DamagedFile


def images(n: int = 64) -> Tensor:
    return torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return sosie.stitch(cnn(0), "1", cnn(1), "3", images()).save(tmp_path / "s.safetensors")


def test_a_stitch_comes_back_as_it_was(tmp_path: Path) -> None:
    s = sosie.stitch(cnn(0), "1", cnn(1), "3", images(), fit="reduced_rank(k=2)")
    found = sosie.Stitch.load(s.save(tmp_path / "s.safetensors"), cnn(0), cnn(1))
    assert torch.equal(found.model(images()), s.model(images()))
    assert (found.fit, found.report, found.n, found.history) == (s.fit, s.report, s.n, s.history)
    assert found.evaluate(images()) == s.evaluate(images())
    again = sosie.Stitch.load(tmp_path / "s.safetensors", cnn(0), cnn(1), example=images(2))
    assert torch.equal(again.model(images()), s.model(images()))


def test_other_models_are_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="model B is not the model that was stitched"):
        sosie.Stitch.load(saved, cnn(0), cnn(2))
    with pytest.raises(ValueError, match="model A is not the model"):
        sosie.Stitch.load(saved, cnn(1), cnn(1))
    with pytest.raises(ValueError, match=r"input of model A was not prepared"):
        sosie.Stitch.load(saved, cnn(0), cnn(1), prepare_a=lambda x: x)


def test_how_inputs_were_prepared_is_asked_for(tmp_path: Path) -> None:
    s = sosie.stitch(cnn(0), "1", cnn(1), "1", images(), prepare_b=lambda x: 2 * x)
    path = s.save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="give prepare_b="):
        sosie.Stitch.load(path, cnn(0), cnn(1))
    found = sosie.Stitch.load(path, cnn(0), cnn(1), prepare_b=lambda x: 2 * x)
    assert torch.equal(found.model(images()), s.model(images()))


def test_specifications_and_tokens(tmp_path: Path) -> None:
    texts = ("small_cnn(seed=0)", "small_cnn(seed=1)")
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    site = sosie.compare(*texts, x).sites_a[1]
    s = sosie.stitch(texts[0], site, texts[1], site, x)
    found = sosie.Stitch.load(s.save(tmp_path / "s.safetensors"), *texts)
    assert torch.equal(found.model(x), s.model(x))

    class Words(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(input_ids)).mean(1))

    tokens = torch.randint(9, (20, 5), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        a, b = Words(0), Words(1)
    t = sosie.stitch(a, "mix", b, "mix", {"input_ids": tokens})
    back = sosie.Stitch.load(t.save(tmp_path / "t.safetensors"), a, b)
    assert torch.equal(back.model({"input_ids": tokens}), t.model({"input_ids": tokens}))


def rewritten(path: Path, change: Any) -> Path:
    """The file with its tensors and its record changed."""
    with safe_open(path, framework="pt") as opened:
        text, tensors = dict(opened.metadata()), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    about = json.loads(text["about"])
    change(tensors, about, text)
    if "about" in text:
        text["about"] = json.dumps(about)
    save_file(tensors, path, metadata=text)
    return path


DAMAGE = {
    "not a number": lambda t, a, m: t["weight"].fill_(float("nan")),
    "another shape": lambda t, a, m: t.update(weight=torch.zeros(3, 3)),
    "no weight": lambda t, a, m: t.pop("weight"),
    "whole numbers": lambda t, a, m: t.update(bias=torch.zeros(len(t["bias"]), dtype=torch.int64)),
    "one more": lambda t, a, m: t.update(more=torch.zeros(1)),
    "no report": lambda t, a, m: a.pop("report"),
    "no site": lambda t, a, m: a["a"].pop("site"),
    "a number as site": lambda t, a, m: a["b"].update(site=3),
    "a list as record": lambda t, a, m: a.update(a=[]),
    "a huge joint": lambda t, a, m: a["a"]["form"].update(channels=2**40),
    "a negative size": lambda t, a, m: a["a"]["form"].update(space=[-1, 3]),
    "no resize": lambda t, a, m: a.update(resize="melt"),
    "a huge example": lambda t, a, m: a["a"]["example"]["args"][0].update(shape=[2**40]),
    "a strange type": lambda t, a, m: a["a"]["example"]["args"][0].update(dtype="load"),
    "no record": lambda t, a, m: m.pop("about"),
    "another format": lambda t, a, m: m.update(format="other"),
    "a later version": lambda t, a, m: m.update(version="99"),
    "a version without end": lambda t, a, m: m.update(version="9" * 5000),
    "fewer rows than none": lambda t, a, m: a.update(n=-5),
    "rows without end": lambda t, a, m: a.update(n=10**400),
    "no lines of history": lambda t, a, m: a.update(history=[1, "x"]),
    "two huge sides": lambda t, a, m: [a[side]["form"].update(channels=2**20) for side in "ab"],
    "eight bits": lambda t, a, m: t.update({key: value.to(torch.float8_e4m3fn) for key, value in t.items()}),
    "a type without arithmetic": lambda t, a, m: a["a"]["example"]["args"][0].update(dtype="quint8"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_in_words(saved: Path, damage: str) -> None:
    with pytest.raises(DamagedFile, match=r"s\.safetensors"):
        sosie.Stitch.load(rewritten(saved, DAMAGE[damage]), cnn(0), cnn(1))


def test_numbers_without_end_in_the_record(saved: Path) -> None:
    with safe_open(saved, framework="pt") as opened:
        text, tensors = dict(opened.metadata()), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    save_file(tensors, saved, metadata={**text, "about": '{"n": ' + "9" * 5000 + "}"})
    with pytest.raises(DamagedFile, match=r"s\.safetensors"):
        sosie.Stitch.load(saved, cnn(0), cnn(1))


def test_an_example_that_the_model_cannot_read_is_asked_for(saved: Path) -> None:
    def other(tensors: Any, about: Any, text: Any) -> None:
        about["a"]["example"]["args"][0]["shape"] = [7, 7, 7]

    with pytest.raises(ValueError, match="give a batch of its data as example="):
        sosie.Stitch.load(rewritten(saved, other), cnn(0), cnn(1))


def test_what_is_no_file_of_ours(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sosie.Stitch.load(tmp_path / "nothing", cnn(0), cnn(1))
    cut_off = tmp_path / "s2.safetensors"
    cut_off.write_bytes(saved.read_bytes()[:-9])
    with pytest.raises(DamagedFile, match="cannot be read"):
        sosie.Stitch.load(cut_off, cnn(0), cnn(1))
    pickled = tmp_path / "s.pt"
    torch.save({"weight": torch.zeros(2)}, pickled)
    with pytest.raises(DamagedFile):
        sosie.Stitch.load(pickled, cnn(0), cnn(1))


def test_a_site_of_another_shape_is_refused(saved: Path) -> None:
    def elsewhere(tensors: Any, about: Any, text: Any) -> None:
        about["a"]["site"] = "3"

    with pytest.raises((ValueError, RuntimeError), match=r"joint is for|shape"):
        sosie.Stitch.load(rewritten(saved, elsewhere), cnn(0), cnn(1))
