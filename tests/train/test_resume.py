"""Training that is interrupted and goes on is, to the last bit, training that was not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_training import MovingMasks, energy, images, network, numbers, same
from torch import nn

from sosie.files import DamagedFile, _process_space, read_nested, write_nested
from sosie.history import Recorder, open_run
from sosie.train import Attached, Augment, Penalty, Recipe, fit
from sosie.train.loop import KIND, VERSION
from sosie.train.sparse import Masks, Regrow

WAYS: dict[str, dict[str, Any]] = {
    "adam": {"decay": 0.01, "augment": Augment(pad=1), "average": 0.9},
    "sgd": {"optimiser": "sgd", "rate": 0.05, "schedule": "cosine", "warmup": 1.5, "clip": 0.5, "moving": True},
    "plain": {"optimiser": "sgd", "momentum": 0.0, "schedule": "constant", "penalised": True, "moving": True},
    "attacked": {"attack": "fast_fgsm", "mixed": True, "schedule": "cosine"},
}


class Interrupted(Exception):
    pass


def train(*, start: int = 0, stop: int | None = None, moving: bool = False, penalised: bool = False, **how: Any) -> Any:
    """A network begun with the seed `start`; `stop`: the epoch after which it is interrupted."""
    x, y = images()
    model = network(start)
    told: list[int] = []

    def after_epoch(epoch: int) -> None:
        told.append(epoch)
        if epoch == stop:
            raise Interrupted

    kept = {"checkpoint": how.pop("checkpoint")} if "checkpoint" in how else {}
    given = {"recipe": Recipe(**{"epochs": 5, "batch": 30} | how), "seed": 0, "after_epoch": after_epoch} | kept
    given |= {"masks": MovingMasks(model)} if moving else {}
    with Attached(model, ["0", "5"], energy, every=3, weight=1.0 if penalised else 0.0) as penalty:
        given |= {"penalty": penalty} if penalised else {}
        try:
            fit(model, x, y, **given)
        except Interrupted:
            assert stop is not None
    return numbers(model), told


@pytest.mark.parametrize("way", WAYS)
def test_what_was_interrupted_ends_as_what_was_not(way: str, tmp_path: Path) -> None:
    wanted, told = train(**WAYS[way])
    assert told == [0, 1, 2, 3, 4, 5]
    kept = {"checkpoint": tmp_path / "c.safetensors", **WAYS[way]}
    _, told = train(stop=3, **kept)
    assert told == [0, 1, 2, 3]  # interrupted before the third was saved
    _, told = train(start=7, stop=3, **kept)  # another network, other random numbers: the file's are taken
    assert told == [3]
    found, told = train(start=8, **kept)
    assert told == [3, 4, 5]
    assert same(found, wanted)
    again, told = train(start=9, **kept)  # nothing is left to do
    assert told == []
    assert same(again, wanted)


def test_each_kind_of_past_matters(tmp_path: Path) -> None:
    """What the test above would not see if it were forgotten, it would not test."""
    for way, part in [("adam", "average"), ("sgd", "schedule"), ("plain", "penalty"), ("plain", "masks")]:
        path = tmp_path / f"{way}-{part}.safetensors"
        wanted, _ = train(**WAYS[way])
        train(stop=3, checkpoint=path, **WAYS[way])
        about, state = read_nested(path, KIND, VERSION)
        fresh = tmp_path / f"{way}-{part}-fresh.safetensors"
        train(stop=2, checkpoint=fresh, **WAYS[way])  # an epoch earlier
        state[part] = read_nested(fresh, KIND, VERSION)[1][part]
        write_nested(path, KIND, VERSION, about, state)
        found, _ = train(checkpoint=path, **WAYS[way])
        assert not same(found, wanted), (way, part)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_training_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    done = python(Path(__file__).with_name("killed_training.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["kills"] >= 5
    assert found["torn"] >= 1  # killed in the middle of writing
    assert found["left"] == ["training.safetensors"]


def test_a_file_of_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    x, y = images()
    path = tmp_path / "c.safetensors"

    def begin(model: nn.Module | None = None, x: torch.Tensor = x, y: torch.Tensor = y, **how: Any) -> None:
        settings = {name: how.pop(name) for name in list(how) if name in Recipe.__dataclass_fields__}
        recipe = Recipe(**{"epochs": 1, "augment": Augment(pad=1)} | settings)
        fit(model or network(), x, y, recipe=recipe, **{"seed": 0, "checkpoint": path} | how)

    begin()
    before = path.read_bytes()
    frozen, wider = network(), network()
    frozen[0].requires_grad_(False)
    wider[5] = nn.Linear(8 * 36, 3)
    penalty = Attached(network(), "0", energy, weight=0.5)
    for other, words in [
        ({"rate": 0.1}, "rate is 0.005 in the file and 0.1 now"),
        ({"epochs": 2, "seed": 1}, "epochs is 1 in the file and 2 now; seed is 0 in the file and 1 now"),
        ({"augment": Augment(pad=2)}, r"augment is Augment\(pad=1, mirror=True\) in the file and Augment\(pad=2"),
        ({"attack": "fgsm"}, "attack is not set in the file"),
        ({"penalty": penalty}, r"penalty is not set in the file and Attached\(weight=0.5, rows=None, every=1, sites"),
        ({"prepare": energy}, "prepare is not set in the file and energy now"),
        ({"model": frozen}, "trained is .*'0.weight'"),
        ({"model": wider}, r"model 5.weight is torch.float32 \(2, 288\) in the file and torch.float32 \(3, 288\) now"),
        ({"x": x.flip(0)}, "images is torch.uint8"),
        ({"y": 1 - y}, "labels is torch.int64"),
    ]:
        with pytest.raises(ValueError, match=f"another training: .*{words}"):
            begin(**other)
    assert path.read_bytes() == before
    begin(save_every=3, task="other words", after_epoch=print)  # what does not change the result may change


def test_penalties_and_moving_masks_of_other_settings_are_others(tmp_path: Path) -> None:
    x, y = images()
    path = tmp_path / "c.safetensors"

    def begin(penalty: dict[str, Any], grow: dict[str, Any]) -> None:
        model = network()
        with Penalty(model, **({"sites": ["0", "5"], "pairs": "all", "rows": None} | penalty)) as term:
            masks = Regrow(Masks.of(model), **({"steps": 9, "every": 2} | grow))
            fit(model, x, y, recipe=Recipe(epochs=1), seed=0, penalty=term, masks=masks, checkpoint=path)

    begin({}, {})
    for other, words in [
        ({"measure": "debiased_cka"}, "penalty measure is linear_cka in the file and debiased_cka now"),
        ({"reduce": "mean"}, "penalty reduce is sum in the file and mean now"),
        ({"pairs": [("0", "5")]}, "penalty pairs is all in the file"),
        ({"sites": ["0", "2", "5"]}, "penalty sites is .* in the file"),
        ({"rule": "mean"}, "penalty rule is flatten in the file and mean now"),
    ]:
        with pytest.raises(ValueError, match=f"another training: {words}"):
            begin(other, {})
    for grow, words in [
        ({"how": "random"}, "masks how is gradient in the file and random now"),
        ({"fraction": 0.1}, "masks fraction is 0.3 in the file and 0.1 now"),
        ({"steps": 10, "seed": 1}, "masks steps is 9 in the file and 10 now; masks seed is 0 in the file and 1 now"),
    ]:
        with pytest.raises(ValueError, match=f"another training: {words}"):
            begin({}, grow)
    begin({}, {})


def test_files_that_are_no_checkpoints_are_refused_and_left(tmp_path: Path) -> None:
    x, y = images()
    path = tmp_path / "c.safetensors"
    fit(network(), x, y, recipe=Recipe(epochs=1), seed=0, checkpoint=path)
    whole = path.read_bytes()
    for content, words in [(b"nothing", "cannot be read"), (whole[:-1000], "cannot be read"), (None, "not a sosie")]:
        if content is None:
            save_file({"weight": torch.ones(2)}, path)
            content = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=words):
            fit(network(), x, y, recipe=Recipe(epochs=1), seed=0, checkpoint=path)
        assert path.read_bytes() == content
    with pytest.raises(IsADirectoryError):
        fit(network(), x, y, recipe=Recipe(epochs=1), seed=0, checkpoint=tmp_path)


def test_the_file_is_tensors_and_json(tmp_path: Path) -> None:
    x, y = images()
    path = tmp_path / "c.safetensors"
    model = fit(network(), x, y, recipe=Recipe(epochs=2), seed=0, checkpoint=path)
    tensors = load_file(path)
    assert all(torch.equal(tensors[f"model/{name}"], value) for name, value in model.state_dict().items())
    with safe_open(path, framework="pt") as opened:
        text = opened.metadata()
    assert json.loads(text["about"])["rate"] == 0.005


def test_it_is_written_after_every_so_many_epochs_and_the_last(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    x, y = images()
    seen: list[int | None] = []

    def look(epoch: int) -> None:
        seen.append(read_nested(path, KIND, VERSION)[1]["epoch"] if path.exists() else None)

    (tmp_path / f".c.safetensors.{_process_space()}-{2**31 - 1}-abc.part").write_bytes(b"left by a kill")
    fit(network(), x, y, recipe=Recipe(epochs=5), seed=0, checkpoint=path, save_every=2, after_epoch=look)
    assert seen == [None, None, None, 2, 2, 4]
    assert read_nested(path, KIND, VERSION)[1]["epoch"] == 5
    assert [item.name for item in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_recorder_goes_back_with_the_training(tmp_path: Path) -> None:
    x, y = images()
    given: dict[str, Any] = {"recipe": Recipe(epochs=5), "seed": 0, "save_every": 2}
    given["checkpoint"] = tmp_path / "c.safetensors"
    model = network()
    with Recorder(tmp_path / "killed", model, "weights") as recorder:

        def until(epoch: int) -> None:
            recorder.record(epoch)
            if epoch == 3:
                raise Interrupted

        with pytest.raises(Interrupted):
            fit(model, x, y, after_epoch=until, **given)
        assert recorder.steps == [0, 1, 2, 3]  # the checkpoint is that of 2
    model = network(5)
    with Recorder(tmp_path / "killed", model, "weights") as recorder:
        fit(model, x, y, after_epoch=recorder.record, **given)
    run = open_run(tmp_path / "killed")
    assert run.steps == [0, 1, 2, 3, 4, 5]
    assert torch.equal(run.tensor(5, "0"), model[0].weight)


def test_a_penalty_goes_on_with_what_is_due() -> None:
    model = network()
    x = images()[0][:4].float()
    with Attached(model, "0", energy, every=3) as penalty:
        penalty.load_state_dict({"step": 2})
        assert not penalty.due
        model(x)
        assert float(penalty().detach()) == 0
        assert penalty.state_dict() == {"step": 3}
        model(x)
        assert float(penalty().detach()) > 0
        with pytest.raises(ValueError, match=r"step must be .* got -1"):
            penalty.load_state_dict({"step": -1})
        penalty.load_state_dict({"step": 6})  # due: the next forward is kept
        model(x)
        assert float(penalty().detach()) > 0


def test_states_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": {0: {"step": 0.1, "buffer": torch.arange(6).reshape(2, 3).T}, 1: {}},
        "pair": (1, [None, True, "words", float("inf")]),
        "mask": torch.tensor([True, False]),
    }
    write_nested(tmp_path / "s.safetensors", KIND, VERSION, {"a": 1}, state)
    about, found = read_nested(tmp_path / "s.safetensors", KIND, VERSION)
    assert about == {"a": 1}
    assert torch.equal(found["numbers"][0].pop("buffer"), state["numbers"][0].pop("buffer"))
    assert torch.equal(found.pop("mask"), state.pop("mask"))
    assert found == state
    assert type(found["pair"]) is tuple
    with pytest.raises(TypeError, match="numbers/0 is a object"):
        write_nested(tmp_path / "s.safetensors", KIND, VERSION, {}, {"numbers": {0: object()}})
