"""Models of other libraries, through stand-ins: the libraries themselves are optional."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sosie.models import Normalise, Tokenise, open_model, parse_normalisation, weights_of


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    for part in [name.rpartition(".")[0], name]:
        if part:
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


@pytest.mark.parametrize(("spec", "name"), [("torchvision:resnet18", "torchvision"), ("timm:vit", "timm")])
def test_a_missing_library_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch, spec: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"{spec} needs {name}, .*: pip install {name}"):
        open_model(spec)


def test_missing_transformers_come_with_the_extra(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers, .*: pip install 'sosie\[hf\]'"):
        open_model(f"hf:{folder}")


def stand_in_for_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object, dict[str, object]]]:
    """A torchvision of two models; returns what its models were made with."""
    calls = []
    default = SimpleNamespace(transforms=lambda: SimpleNamespace(mean=[0.5], std=[0.25]))

    def get_model(name: str, weights: object, **options: object) -> nn.Module:
        calls.append((name, weights, options))
        return nn.Linear(2, 2)

    def resnet18(*, weights: object = None, **options: object) -> None: ...
    def detector(*, weights: object = None, weights_backbone: object = "some", **options: object) -> None: ...

    def get_model_builder(name: str) -> Callable[..., None]:
        builders = {"resnet18": resnet18, "detector": detector}
        if name not in builders:
            raise ValueError(f"Unknown model {name}")
        return builders[name]

    def get_model_weights(name: str) -> SimpleNamespace:
        if name != "resnet18":
            raise ValueError("The weights class for the specific method couldn't be retrieved")
        return SimpleNamespace(DEFAULT=default)

    functions = [get_model, get_model_builder, get_model_weights]
    stand_in(monkeypatch, "torchvision.models", **{function.__name__: function for function in functions})
    return calls


def test_a_seed_chooses_a_librarys_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_torchvision(monkeypatch)
    stand_in(monkeypatch, "timm", create_model=lambda name, pretrained: nn.Linear(2, 2))
    for library in ("torchvision", "timm"):
        one, same = open_model(f"{library}:resnet18(seed=1)"), open_model(f"{library}:resnet18", seed=1)
        assert one.name == same.name == f"{library}-resnet18-seed1"
        assert weights_of(one) == "random weights (seed 1)"
        assert torch.equal(one.model.weight, same.model.weight)
        assert not torch.equal(one.model.weight, open_model(f"{library}:resnet18").model.weight)


def test_a_library_neither_loads_nor_downloads_weights_that_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in_for_torchvision(monkeypatch)
    assert weights_of(open_model("torchvision:detector")) == "random weights (seed 0)"
    assert calls[-1][2] == {"weights_backbone": None}
    given = open_model("torchvision:detector(weights_backbone='some')")
    assert weights_of(given) == "random weights (seed 0) except weights_backbone='some'"
    stand_in(monkeypatch, "timm", create_model=lambda name, **options: nn.Linear(2, 2))
    for spec in (
        "torchvision:resnet18(weights='DEFAULT')",
        "timm:vit(pretrained=True)",
        "timm:vit(checkpoint_path='w')",
    ):
        plain = spec.partition("(")[0]
        with pytest.raises(ValueError, match=f"weights are named as {plain}@DEFAULT or @file"):
            open_model(spec)


def test_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = stand_in_for_torchvision(monkeypatch)
    random = open_model("torchvision:resnet18(num_classes=7)")
    assert (random.name, random.prepare) == ("torchvision-resnet18(num_classes=7)-seed0", None)
    assert weights_of(random) == "random weights (seed 0)"
    assert calls == [("resnet18", None, {"num_classes": 7})]
    own = open_model("torchvision:resnet18@DEFAULT")
    assert own.prepare == Normalise((0.5,), (0.25,))
    assert (own.name, weights_of(own)) == ("torchvision-resnet18", "torchvision's own weights")
    assert calls[-1] == ("resnet18", "DEFAULT", {})
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "w.safetensors")
    filled = open_model(f"torchvision:resnet18(normalise='imagenet')@{tmp_path / 'w.safetensors'}")
    assert (filled.name, calls[-1][1]) == ("resnet18@w", None)
    assert filled.prepare == parse_normalisation("imagenet")
    assert weights_of(filled) == "weights of w.safetensors"
    with pytest.raises(ValueError, match="torchvision:resnet81: Unknown model"):
        open_model("torchvision:resnet81")


def test_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(ImportError, match=r"cannot be imported with this torch .*nms"):
        open_model("torchvision:resnet18")


def test_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def create_model(name: str, pretrained: bool, num_classes: int = 2, in_chans: int = 1) -> nn.Module:
        model = nn.Linear(2, num_classes)
        model.pretrained_cfg = {"mean": (0.5,), "std": (0.25,), "num_classes": 2} if name.startswith("vit") else {}
        return model

    stand_in(monkeypatch, "timm", create_model=create_model)
    assert open_model("timm:vit_base_patch16_224.augreg_in1k").prepare is None
    own = open_model("timm:vit@DEFAULT")
    assert (own.prepare, weights_of(own)) == (Normalise((0.5,), (0.25,)), "timm's own weights")
    assert weights_of(open_model("timm:vit(num_classes=3)@DEFAULT")) == "timm's own weights with a random head (seed 0)"
    weights = tmp_path / "w.safetensors"
    save_file(nn.Linear(2, 2).state_dict(), weights)
    assert open_model(f"timm:vit@{weights}").prepare == Normalise((0.5,), (0.25,)), "timm's own normalisation"
    assert open_model(f"timm:vit(normalise='none')@{weights}").prepare is None
    assert open_model(f"timm:bare@{weights}").prepare is None, "timm has none for it"
    assert open_model(f"timm:vit(in_chans=3)@{weights}").prepare is None, "timm has none for so many channels"
    save_file(nn.Linear(2, 2).state_dict(), weights, {"normalise": "mean 0.1 std 0.2"})
    assert open_model(f"timm:vit@{weights}").prepare == Normalise((0.1,), (0.2,)), "what the file says comes first"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like one of save_pretrained's."""
    found = tmp_path / "bert"
    found.mkdir()
    (found / "config.json").write_text("{}")
    save_file(nn.Linear(2, 2).state_dict(), found / "model.safetensors")
    return found


def hugging_face(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """A stand-in for transformers; returns what its loaders were called with."""
    calls: list[dict[str, object]] = []

    def load_model(folder: str, **options: object) -> tuple[nn.Module, dict[str, object]]:
        calls.append({"folder": folder, **options})
        model = nn.Linear(2, 2)
        model.config = SimpleNamespace()
        return model, {"missing_keys": set(missing), "unexpected_keys": set()}

    def load_tokenizer(folder: str, **options: object) -> SimpleNamespace:
        calls.append({"folder": folder, **options})
        return SimpleNamespace(pad_token=None, eos_token="end", vocab_size=7)

    loaders = {"AutoModel": load_model, "AutoTokenizer": load_tokenizer}
    content = {name: SimpleNamespace(from_pretrained=loader) for name, loader in loaders.items()}
    quiet = {"get_verbosity": int, "is_progress_bar_enabled": bool, "disable_progress_bar": int}
    logging = SimpleNamespace(set_verbosity_error=int, set_verbosity=lambda level: None, **quiet)
    stand_in(monkeypatch, "transformers", __version__="5.0.0", utils=SimpleNamespace(logging=logging), **content)
    return calls


SAFELY = {"local_files_only": True, "trust_remote_code": False}


def test_hugging_face_loads_neither_code_nor_pickles_nor_from_the_network(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    calls = hugging_face(monkeypatch)
    opened = open_model(f"hf:{folder}")
    assert (opened.name, opened.prepare) == ("bert", None)
    assert calls == [{"folder": str(folder), "use_safetensors": True, "output_loading_info": True, **SAFELY}]


def test_what_a_hugging_face_model_needs_comes_from_its_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    calls = hugging_face(monkeypatch)
    (folder / "tokenizer.json").write_text("{}")
    prepare = open_model(f"hf:{folder}").prepare
    assert isinstance(prepare, Tokenise)
    assert prepare.tokenizer.pad_token == "end", "a tokeniser that cannot pad is given a token to pad with"
    assert calls[-1] == {"folder": str(folder), **SAFELY}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5]}))
    assert open_model(f"hf:{folder}").prepare == Normalise((0.5,), (0.5,))


def test_a_folder_that_is_not_whole_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    hugging_face(monkeypatch)
    with pytest.raises(FileNotFoundError, match="no file"):
        open_model(f"hf:{folder.parent / 'nowhere'}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="but no weights at all"):
        open_model(f"hf:{folder}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin, which sosie does not unpickle.*save_pretrained"):
        open_model(f"hf:{folder}")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_model(f"hf:{folder}")


def test_weights_that_would_be_random_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    hugging_face(monkeypatch, missing=("layer.0.weight", "pooler.dense.weight"))
    with pytest.raises(ValueError, match=r"no weights for layer\.0\.weight, which would be random"):
        open_model(f"hf:{folder}")
    hugging_face(monkeypatch, missing=("pooler.dense.weight",))
    assert open_model(f"hf:{folder}").name == "bert"
