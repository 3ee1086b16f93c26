from __future__ import annotations

import pytest

from sosie.models import build_model, list_models
from sosie.models.convolutional import CifarResNet, ResNet
from sosie.models.specification import architecture


def test_names_are_listed_in_natural_order() -> None:
    names = list_models()
    assert names.index("resnet20") < names.index("resnet110")
    assert {"tiny10", "resnet20", "resnet50", "inception_v1", "alexnet", "vgg11", "vit", "small_cnn"} <= set(names)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_the_imagenet_family_wins_where_both_know_the_depth(name: str) -> None:
    assert isinstance(build_model(name), ResNet)


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet-26", "resnet_44"])
def test_any_other_depth_is_the_cifar_family(name: str) -> None:
    assert isinstance(build_model(name), CifarResNet)


def test_the_cifar_network_of_depth_50_by_option() -> None:
    assert len(build_model("cifar_resnet", {"depth": 50}).layer1) == 8


def test_hyphens_and_capitals() -> None:
    assert type(build_model("Inception-V1")).__name__ == "InceptionV1"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet21", {}, "6n \\+ 2, not 21; nearest: 20 and 26"),
        ("tinny10", {}, "did you mean 'tiny10'"),
        ("zzzz", {}, "alexnet, cifar_resnet"),
        ("tiny10", {"widht": 2}, "no option 'widht'; it has classes, channels, width"),
        ("resnet20", {"shortcut": "C"}, "shortcut must be .*'A', 'B', got 'C'"),
        ("resnet20", {"width": 0}, "leaves no channels"),
        ("resnet20", {"classes": "ten"}, "cannot build resnet20.*classes='ten'"),
        ("resnet18", {"stem": "small"}, "stem must be .*'cifar', got 'small'"),
        ("vit", {"width": 100, "heads": 3}, "100 cannot be split into 3"),
        ("vit", {"size": 30}, "30 cannot be cut"),
        ("small_cnn", {"size": 7}, "side 7 are too small"),
    ],
)
def test_errors_say_what_to_do(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, options)


def test_an_architecture_is_defined_once() -> None:
    def tiny10() -> None:
        raise NotImplementedError

    with pytest.raises(ValueError, match="'tiny10' is already defined"):
        architecture(lambda state: {})(tiny10)
