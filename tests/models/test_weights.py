from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

from sosie.files import DamagedFile
from sosie.models import load_weights, open_model, read_weights, small_cnn, tiny10


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil-was-here",)


def net(classes: int = 3, head: str = "fc") -> nn.Module:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 4, 3))
    model.add_module("bn", nn.BatchNorm2d(4))
    model.add_module(head, nn.Linear(4, classes))
    return model


def test_safetensors_round_trip_with_metadata(tmp_path: Path) -> None:
    source, target = net(), net()
    state = {key: value for key, value in source.state_dict().items() if "num_batches" not in key}
    save_file(state, tmp_path / "w.safetensors", {"normalise": "none"})
    assert load_weights(target, tmp_path / "w.safetensors") == {"normalise": "none"}
    assert torch.equal(target.conv.weight, source.conv.weight)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "net."])  # net: the attribute of a LightningModule
def test_torch_files_with_their_wrappers(tmp_path: Path, wrap: object, prefix: str) -> None:
    source, target = net(), net()
    torch.save(wrap({prefix + key: value for key, value in source.state_dict().items()}), tmp_path / "w.pt")
    assert load_weights(target, tmp_path / "w.pt") == {}
    assert torch.equal(target.fc.weight, source.fc.weight)


def test_half_precision_takes_the_type_of_the_parameter(tmp_path: Path) -> None:
    source, target = net(), net()
    save_file({key: value.half() for key, value in source.state_dict().items()}, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert target.fc.weight.dtype == torch.float32
    assert torch.equal(target.fc.weight, source.fc.weight.half().float())


def test_one_error_lists_everything_that_does_not_fit(tmp_path: Path) -> None:
    state = dict(net().state_dict())
    state["extra.weight"] = torch.zeros(2)
    state["conv.weight"] = torch.zeros(4, 3, 3, 3)
    del state["bn.bias"]
    save_file(state, tmp_path / "w.safetensors")
    target = net()
    before = target.fc.weight.clone()
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_weights(target, tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "1 missing in the file: bn.bias" in message
    assert "1 in the file but not in the model: extra.weight" in message
    assert "conv.weight (model (4, 1, 3, 3), file (4, 3, 3, 3))" in message
    assert "head" not in message
    assert torch.equal(target.fc.weight, before)  # nothing is half-loaded


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"50 missing.* and 42 more") as caught:
        load_weights(tiny10(), tmp_path / "w.safetensors")
    assert "No name agrees" in str(caught.value)


@pytest.mark.parametrize("other", [net(classes=7), net(head="linear")])
def test_a_head_that_alone_differs_is_named(tmp_path: Path, other: nn.Module) -> None:
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="Only the head fc differs"):
        load_weights(net(), tmp_path / "w.safetensors")


def test_whole_numbers_do_not_become_weights(tmp_path: Path) -> None:
    state = {key: value.to(torch.int8) for key, value in net().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="int8"):
        load_weights(net(), tmp_path / "w.safetensors")


def test_pickles_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("w.pkl", "w.pickle", "w.joblib", "w.pt", "w.pth"):
        Path(name).write_bytes(pickle.dumps({"state_dict": Evil()}, protocol=2))
    torch.save(Evil(), "w.ckpt")
    torch.save(net(), "module.pt")
    for name in ("w.pkl", "w.pickle", "w.joblib", "w.pt", "w.pth", "w.ckpt", "module.pt"):
        with pytest.raises(ValueError, match=r"can run any code.*save_file"):
            read_weights(name)
    assert not Path("evil-was-here").exists()


def test_a_refused_object_is_named(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"holds the Python object torch\.nn"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("keep", [0, 5, 0.3, 0.9])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(net().state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 or keep == 0 else keep * len(content))])
    with pytest.raises(DamagedFile, match=rf"w\.{suffix}"):
        read_weights(path)


def test_what_is_no_weights_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weights file"):
        read_weights(tmp_path / "none.safetensors")
    (tmp_path / "w.pt").touch()
    with pytest.raises(IsADirectoryError, match=r"inside it: w\.pt"):
        read_weights(tmp_path)
    (tmp_path / "w.h5").touch()
    with pytest.raises(ValueError, match=r"not from '\.h5'"):
        read_weights(tmp_path / "w.h5")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds list, not a state dict"):
        read_weights(tmp_path / "list.pt")
    torch.save({"a": torch.zeros(1), "epoch": 3}, tmp_path / "mixed.pt")
    with pytest.raises(ValueError, match=r"not tensors: epoch \(int\)"):
        read_weights(tmp_path / "mixed.pt")


@pytest.mark.parametrize("by", ["sosie", "torch"])
def test_masked_models_open_as_they_compute(tmp_path: Path, by: str) -> None:
    torch.manual_seed(0)
    model = small_cnn(width=4)
    if by == "sosie":
        model.conv2.register_buffer("weight_mask", torch.rand_like(model.conv2.weight) < 0.5)
    else:
        prune.l1_unstructured(model.conv2, "weight", amount=0.5)
    x = torch.rand(3, 1, 28, 28)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    found = open_model(f"small_cnn@{tmp_path / 'm.safetensors'}").model
    assert set(found.state_dict()) == set(small_cnn(width=4).state_dict())
    masked = model.conv2.weight_mask == 0
    assert (found.conv2.weight[masked] == 0).all()
    assert torch.equal(found.conv1.weight, model.conv1.weight)
    if by == "torch":
        assert torch.allclose(found(x), model(x))
    loaded = small_cnn(width=4)
    load_weights(loaded, tmp_path / "m.safetensors")
    assert torch.equal(loaded.conv2.weight, found.conv2.weight)
