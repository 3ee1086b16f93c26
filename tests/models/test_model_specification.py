from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sosie.models import NamedModel, Normalise, build_model, list_models, open_model, weights_of

SMALL = [name for name in list_models() if name in {"tiny10", "resnet20", "vit", "small_cnn", "efficientnet_lite0"}]


def save(model: nn.Module, path: Path, **metadata: str) -> Path:
    state = {key: value.contiguous() for key, value in model.state_dict().items() if "num_batches" not in key}
    save_file(state, path, metadata)
    return path


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_bare_name_is_random_from_the_seed() -> None:
    one, again, other = open_model("tiny10"), open_model("tiny10", seed=0), open_model("tiny10(seed=1)")
    assert isinstance(one, NamedModel)
    assert not one.model.training
    assert (one.name, one.prepare, one.spec) == ("tiny10-seed0", None, "tiny10")
    assert other.name == "tiny10-seed1"
    assert same(one.model, again.model)
    assert not same(one.model, other.model)


def test_where_weights_are_from_is_said_as_long_as_it_is_true(tmp_path: Path) -> None:
    one = open_model("tiny10(seed=1)")
    assert weights_of(one) == "random weights (seed 1)"
    path = save(one.model, tmp_path / "t.safetensors")
    assert weights_of(open_model(f"tiny10@{path}")) == "weights of t.safetensors"
    file = tmp_path / "net.py"
    file.write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n")
    assert weights_of(open_model(f"{file}:make")) == "", "a factory may have loaded them"
    assert weights_of(one.model) == ""
    one.model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert weights_of(one) == "random weights (seed 1)"
    torch.optim.SGD(one.model.parameters(), 0.1).step()
    assert weights_of(one) == "", "they were trained"


def test_the_global_random_state_is_left_as_found(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import random, numpy, torch\n"
        "def make():\n"
        "    random.random(); numpy.random.rand(); torch.manual_seed(5)\n"
        "    return torch.nn.Linear(2, 2)\n"
    )
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    open_model("tiny10")
    open_model(f"{file}:make")
    with pytest.raises(TypeError, match="unexpected keyword"):
        open_model(f"{file}:make(width=2)")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("name", SMALL)
def test_a_file_comes_back(tmp_path: Path, name: str) -> None:
    model = build_model(name)
    path = save(model, tmp_path / f"my-{name}.safetensors")
    opened = open_model(f"{name}@{path}")
    assert same(opened.model, model)
    assert opened.name == f"my-{name}"
    assert opened.prepare is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet20", {"shortcut": "B", "width": 2, "classes": 7}),
        ("resnet20", {"head": "fc", "channels": 1, "width": 0.5}),
        ("cifar_resnet", {"depth": 14}),
        ("tiny10", {"width": 0.5, "classes": 100}),
        ("resnet18", {"stem": "cifar", "classes": 10}),
        ("vgg11_bn", {"size": 64, "hidden": 32}),
        ("alexnet", {"hidden": 16, "classes": 4}),
        ("vit", {"depth": 2, "width": 64, "patch": 8, "size": 48, "hidden": 100}),
        ("dynamic_vit", {"depth": 3, "width": 64, "heads": 4, "keep": 0.5, "stages": (0, 2), "rule": "eq13"}),
        ("inception_v1", {"stem": "cifar", "classes": 3}),
        ("small_cnn", {"width": 4, "channels": 3, "size": 32}),
    ],
)
def test_the_architecture_adapts_to_the_file(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    model = build_model(name, options)
    opened = open_model(f"{name}@{save(model, tmp_path / 'w.safetensors')}")
    assert same(opened.model, model)
    assert opened.name == f"{name}@w"


def test_side_heads_of_a_published_inception_are_left_out(tmp_path: Path) -> None:
    model = build_model("inception_v1", {"classes": 5})
    state = {**model.state_dict(), "aux1.fc1.weight": torch.zeros(2), "aux2.fc1.weight": torch.zeros(2)}
    torch.save(state, tmp_path / "w.pth")
    assert same(open_model(f"inception_v1@{tmp_path / 'w.pth'}").model, model)


def test_stated_options_win_over_the_file(tmp_path: Path) -> None:
    path = save(build_model("tiny10", {"classes": 7}), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="Only the head fc differs"):
        open_model(f"tiny10(classes=10)@{path}")


def test_another_depth_is_an_error_that_lists_blocks(tmp_path: Path) -> None:
    path = save(build_model("resnet26"), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"in the file but not in the model: layer1\.3\."):
        open_model(f"resnet20@{path}")


def test_normalisation_from_the_metadata_or_the_specification(tmp_path: Path) -> None:
    path = save(build_model("small_cnn"), tmp_path / "w.safetensors", normalise="mean .5 std .25")
    assert open_model(f"small_cnn@{path}").prepare == Normalise((0.5,), (0.25,))
    assert open_model(f"small_cnn(normalise='none')@{path}").prepare is None
    assert open_model("tiny10(normalise='(x*255-127)/128')").prepare == Normalise((127 / 255,), (128 / 255,))
    odd = save(build_model("small_cnn"), tmp_path / "odd.safetensors", normalise="by hand")
    with pytest.raises(ValueError, match=r"odd\.safetensors: unknown normalisation 'by hand'"):
        open_model(f"small_cnn@{odd}")


def test_weights_are_looked_for_in_the_listed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save(build_model("small_cnn"), tmp_path / "b" / "w.safetensors")
    save(build_model("small_cnn"), tmp_path / "outside.safetensors")
    monkeypatch.setenv("SOSIE_WEIGHTS", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert open_model("small_cnn@w.safetensors").name == "small_cnn@w"
    with pytest.raises(FileNotFoundError, match="no file"):
        open_model("small_cnn@../outside.safetensors")
    with pytest.raises(FileNotFoundError, match=r"near it: w\.safetensors"):
        open_model("small_cnn@ww.safetensors")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "a model specification is text"),
        ([0] * 1000, r"got \[0, 0, 0, 0, 0, 0, \.\.\.\]"),
        ("tinny10", "did you mean 'tiny10'"),
        ("w.safetensors", "names no architecture: write tiny10@w.safetensors"),
        ("net.pt2", r"unpickles, .* give torch\.export\.load\('net\.pt2'\) in Python, or write a function"),
        ("net.py", "names no function: write net.py:factory"),
        ("net.py@w.pt", "names no function"),
        ("tiny10(", "cannot read"),
        ("tiny10(a b)", "write options as"),
        ("tiny10(2)", "write options as"),
        ("tiny10(**{})", "write options as"),
        ("tiny10(classes=__import__('os').getpid())", "option 'classes'"),
        ("tiny10(seed=-1)", "seed must be a whole number"),
        ("@w.safetensors", "cannot read"),
        ("tiny10@", "cannot read"),
    ],
)
def test_specifications_that_cannot_be_read(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(spec)


def test_options_are_never_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="option"):
        open_model(f"tiny10(classes=open({str(tmp_path / 'made')!r}, 'w'))")
    assert not (tmp_path / "made").exists()


def test_your_own_factory(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("from torch import nn\nclass Mine(nn.Linear): pass\n")
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n"
        "from layers import Mine\n"
        "def plain(width=2): return Mine(width, 3)\n"
        "def prepared(): return Mine(2, 3), lambda x: x - 1\n"
        "def wrong(): return 5\n"
        "def half(): return Mine(2, 3), 5\n"
        "def exported(): return torch.export.export(Mine(2, 3), (torch.ones(2, 2),))\n"
    )
    path = save(nn.Linear(2, 3), tmp_path / "w.safetensors", normalise="mean .5 std .5")
    assert open_model(f"{file}:plain").name == "net:plain"
    assert open_model(f"{file}:plain(width=7)").model.in_features == 7
    loaded = open_model(f"{file}:plain@{path}")
    assert loaded.name == "plain@w"
    assert loaded.prepare == Normalise((0.5,), (0.5,))
    assert open_model(f"{file}:prepared@{path}").prepare(1) == 0
    assert not loaded.model.training
    assert open_model(f"{file}:exported").model(torch.ones(2, 2)).shape == (2, 3)
    with pytest.raises(TypeError, match=r"wrong in .* it returned int"):
        open_model(f"{file}:wrong")
    with pytest.raises(TypeError, match=r"returned \(Mine, int\)"):
        open_model(f"{file}:half")
    with pytest.raises(ValueError, match="names no function"):
        open_model(f"{file}:")


# what the published files must give: names, parameters, accuracy


def architecture_of(file: str) -> str:
    known = ("tiny10", "resnet20", "resnet32", "resnet56", "efficientnet-lite0")
    return next(name for name in known if name in file)


def test_every_published_file_loads(published: dict[str, tuple[int, float]], weights: Path) -> None:
    assert set(published) == {path.name for path in weights.glob("*.safetensors")}
    for file, (count, _) in published.items():
        opened = open_model(f"{architecture_of(file)}@{file}")
        assert sum(parameter.numel() for parameter in opened.model.parameters()) == count
        assert isinstance(opened.prepare, Normalise)
        assert opened.name == Path(file).stem


def accuracy(opened: NamedModel, batches: object) -> float:
    right = total = 0
    with torch.inference_mode():
        for x, y in batches:
            right += int((opened.model(opened.prepare(x)).argmax(1) == y).sum())
            total += len(y)
    return 100 * right / total


@pytest.mark.parametrize(
    "file",
    [
        "drfrankenstein-tiny10-cifar10-seed00.safetensors",
        "akamaster-resnet20-cifar10.safetensors",
        "drfrankenstein-resnet20w1-cifar10-seed00.safetensors",
    ],
)
def test_published_accuracy(file: str, published: dict[str, tuple[int, float]], images: Path) -> None:
    from sosie.data import open_data

    opened = open_model(f"{architecture_of(file)}@{file}")
    # 500 images have a standard error of 1.5 points themselves: the bound also catches a wrong normalisation
    assert accuracy(opened, open_data("cifar10", max_rows=500)) == pytest.approx(published[file][1], abs=1.5)


def test_published_accuracy_on_imagenet(weights: Path, images: Path) -> None:
    from sosie.data import open_data

    if not (images / "imagenet-val-1k-224.npz").is_file():
        pytest.skip("no imagenet-val-1k-224.npz beside the other images")
    opened = open_model("efficientnet-lite0@efficientnet-lite0-imagenet-fp16.safetensors")
    assert accuracy(opened, open_data("npz:imagenet-val-1k-224.npz", batch=16, max_rows=32)) > 60
