"""Weights that cannot be compared are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from weight_nets import conv, dense

import sosie
from sosie.capture.batches import example_input
from sosie.weights.maps import candidates


def test_models_of_other_inputs() -> None:
    with pytest.raises(ValueError, match="Sequential \\(A\\) takes 20, Sequential \\(B\\) takes 21"):
        sosie.compare_weights(dense([20, 5]), dense([21, 5]))
    with pytest.raises(ValueError, match="takes 20 numbers, not input_shape 3×8×8"):
        sosie.compare_weights(dense([20, 5]), dense([20, 5]), input_shape=(3, 8, 8))
    with pytest.raises(ValueError, match="does not take an input of 2×12×12 or 288; give input_shape"):
        sosie.compare_weights(conv(), conv(1), input_shape=(2, 12, 12))


def test_images_and_their_entries_in_a_row_are_one_input() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(128, 4))
    assert sosie.compare_weights(flat, conv(), input_shape=(2, 8, 8)).matrix().shape == (2, 4)


def test_what_cannot_be_linearised_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"Sequential \(A\): site '2' is not linear in the input.* '1' \(LayerNorm\)"):
        sosie.compare_weights(model, dense([6, 2]), measures="wcka")
    assert sosie.compare_weights(model, dense([6, 2]), sites_a="0").sites_a == ["0"]


def test_models_that_are_no_linear_maps_are_compared_entry_by_entry_and_the_result_says_why() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    found = sosie.compare_weights(model, model)
    assert (list(found.measures), found.sites_a) == (["weight_cosine"], ["0", "1", "all"])
    assert found.matrix().diagonal() == pytest.approx(1)
    assert "wcka is not defined for these models: Sequential (A): '0' (Embedding)" in found.rows()[0]["caveats"][0]
    with pytest.raises(ValueError, match=r"looks up token ids") as raised:
        sosie.compare_weights(model, model, probes=256)
    assert "measures='weight_cosine'" in raised.value.__notes__[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(bad: float) -> None:
    model = dense([6, 4, 2])
    model[2].weight.data[0, 1] = bad
    with pytest.raises(ValueError, match=r"2\.weight of Sequential \(B\) has 1 of 8 values that are NaN"):
        sosie.compare_weights(dense([6, 2]), model)
    norm = conv()
    norm[1].running_var[0] = bad
    with pytest.raises(ValueError, match=r"1\.running_var of .* has 1 of 6"):
        sosie.compare_weights(norm, conv())


def test_a_layer_of_zeros_leaves_values_undefined_and_says_why() -> None:
    model = dense([6, 4, 3])
    model[2].weight.data.zero_()
    found = sosie.compare_weights(dense([6, 4, 3], seed=1), model)
    assert torch.tensor(found.matrix()).isnan()[:, 1:].all()
    assert not torch.tensor(found.matrix()).isnan()[:, 0].any()
    assert any(text.startswith("undefined: the product") for text in found.rows()[1]["caveats"])


def test_a_lone_grouped_convolution_is_linear() -> None:
    a, b = (nn.Conv2d(4, 4, 3, groups=2) for _ in range(2))
    found = sosie.compare_weights(a, b, input_shape=(4, 6, 6))
    assert 0 < found.matrix()[0, 0] < 1
    assert sosie.compare_weights(a, a, input_shape=(4, 6, 6)).matrix()[0, 0] == pytest.approx(1, abs=1e-12)


def test_inputs_that_nothing_tells_are_asked_for() -> None:
    with pytest.raises(ValueError, match="Conv1d does not say how large an input is; give input_shape="):
        sosie.compare_weights(nn.Conv1d(2, 3, 3), nn.Conv1d(2, 3, 3))
    assert sosie.compare_weights(nn.Conv1d(2, 3, 3), nn.Conv1d(2, 3, 3), input_shape=(2, 9)).matrix().shape == (1, 1)
    with pytest.raises(ValueError, match="has no shape yet"):
        sosie.compare_weights(nn.Sequential(nn.LazyLinear(3)), dense([3, 3]))


def test_state_dicts_and_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a state dict does not say how its tensors are connected"):
        sosie.compare_weights(dense([6, 2]).state_dict(), dense([6, 2]))
    code = tmp_path / "net.py"
    code.write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    state = dense([6, 4, 2]).state_dict()
    save_file(state, tmp_path / "right.safetensors")
    save_file({**state, "4.weight": torch.zeros(2, 2)}, tmp_path / "more.safetensors")
    save_file({k: v for k, v in state.items() if k != "2.bias"}, tmp_path / "less.safetensors")
    right, more, less = (f"{code}:make@{tmp_path}/{name}.safetensors" for name in ("right", "more", "less"))
    assert sosie.compare_weights(right, right).matrix()[-1, -1] == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match=r"in the file but not in the model: 4\.weight"):
        sosie.compare_weights(right, more)
    with pytest.raises(ValueError, match=r"missing in the file: 2\.bias"):
        sosie.compare_weights(right, less)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": "linear_cka"}, "linear_cka: of layers.*use compare"),
        ({"measures": []}, "no measures given"),
        ({"probes": 10}, "probes must be a whole number of at least 256"),
        ({"null": "permutation"}, "'weights' or None"),
        ({"match": "rows"}, "match must be .*'rows'"),
        ({"base": dense([6, 2])}, "base= is for measures of tensors"),
        ({"sites_a": "nothing"}, "no module is called 'nothing'"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sosie.compare_weights(dense([6, 2]), dense([6, 2], seed=1), **options)  # type: ignore[arg-type]


def test_bad_lists() -> None:
    with pytest.raises(ValueError, match="at least two"):
        sosie.compare_weights([dense([6, 2])])
    with pytest.raises(TypeError, match="needs two models"):
        sosie.compare_weights(dense([6, 2]))
    with pytest.raises(TypeError, match="are one argument"):
        sosie.compare_weights([dense([6, 2])] * 2, dense([6, 2]))
    with pytest.raises(ValueError, match="sites_a is for all"):
        sosie.compare_weights([dense([6, 2])] * 3, sites_b="output")
    with pytest.raises(ValueError, match="use compare_weights"):
        sosie.compare(dense([6, 2]), dense([6, 2]), [torch.rand(4, 6)], measures="wcka")


def test_a_site_that_is_not_there_is_no_matter_of_input_shapes() -> None:
    with pytest.raises(ValueError, match=r"^Sequential \(B\): no module is called 'nothing'") as caught:
        sosie.compare_weights(conv(), conv(1), sites_b="nothing", input_shape=(2, 8, 8))
    assert "input_shape" not in str(caught.value)


@pytest.mark.parametrize("option", [{"null": "weights"}, {"probes": 512}])
def test_options_that_measures_of_tensors_do_not_have(option: dict[str, str | int]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(option))}= is for wcka and wcka_uncentred, not for weight_cosine"
    ):
        sosie.compare_weights(dense([6, 2]), dense([6, 2]), "weight_cosine", **option)  # type: ignore[arg-type]


def test_both_kinds_of_measures_at_once_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weight_cosine compare single tensors, wcka networks .*separate calls"):
        sosie.compare_weights(dense([6, 2]), dense([6, 2]), ["wcka", "weight_cosine"])


def test_a_base_is_refused_before_neurons_are_matched() -> None:
    with pytest.raises(ValueError, match="base= is for measures of tensors, not for wcka"):
        sosie.compare_weights(dense([6, 2]), dense([6, 4, 2]), match="weights", base=dense([6, 2]))


def test_no_weights_at_all() -> None:
    with pytest.raises(ValueError, match=r"ReLU \(A\) has no weights"):
        sosie.compare_weights(nn.ReLU(), nn.ReLU(), "weight_cosine")


def test_matching_and_maps_guess_one_input() -> None:
    for layer in (nn.Conv2d(1, 2, 3), nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 3, stride=2)):
        guessed = example_input(layer).shape[1:]
        expected = 28 if layer.in_channels == 1 else 224 if layer.stride[0] > 1 else 32
        assert guessed == (layer.in_channels, expected, expected)
        assert candidates(layer, "A", None)[0][0] == guessed


def test_shapes_that_were_only_tried_leave_nothing_on_the_model() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 2, 3), nn.Linear(2 * 26 * 26, 3)
            self.skips: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.skips.append(self.conv(x))
            x = self.head(self.skips[0].flatten(1))
            self.skips.clear()
            return x

    model = Keeps()
    assert example_input(model).shape == (2, 3, 28, 28)
    assert not model.skips
    assert sosie.compare_weights(model, Keeps(), measures="wcka").side_a.sites
    assert not model.skips
