from __future__ import annotations

import pytest
import torch

from sosie.models import Normalise, parse_normalisation

IMAGENET = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ImageNet mean/std", IMAGENET),
        ("imagenet", IMAGENET),
        (
            "CIFAR mean .4914 .4822 .4465 std .2023 .1994 .2010",
            Normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ),
        ("mean 0.5 std 0.25", Normalise((0.5,), (0.25,))),
        ("(x*255-127)/128", Normalise((127 / 255,), (128 / 255,))),
        ("none", None),
    ],
)
def test_known_strings(text: str, expected: Normalise | None) -> None:
    assert parse_normalisation(text) == expected


@pytest.mark.parametrize("text", ["per-image whitening", "mean .5", "(x*0-1)/2", "__import__('os')"])
def test_an_unknown_string_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="normalisation") as caught:
        parse_normalisation(text)
    assert text in str(caught.value)


def test_per_channel_in_the_type_of_the_input() -> None:
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    y = IMAGENET(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y[:, 2], (x[:, 2] - 0.406) / 0.225)
    affine = parse_normalisation("(x*255-127)/128")
    assert affine is not None
    torch.testing.assert_close(affine(x), (x * 255 - 127) / 128)


def test_misuse() -> None:
    with pytest.raises(ValueError, match=r"3 channels does not fit images \(2, 1, 4, 4\)"):
        IMAGENET(torch.rand(2, 1, 4, 4))
    with pytest.raises(TypeError, match="uint8"):
        IMAGENET(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="above 0"):
        Normalise((0.0,), (0.0,))
    with pytest.raises(ValueError, match="one mean and one std"):
        Normalise((0.0, 0.0), (1.0,))


def test_it_shows_itself() -> None:
    assert repr(Normalise((0.5,), (0.25,))) == "Normalise(mean=(0.5,), std=(0.25,))"
