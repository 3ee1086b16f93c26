"""Only statistics of different rows and of the same networks are merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.nets import HERE
from nets import Tokens, inputs, mlp
from torch import Tensor, nn

import sosie
from sosie.data import DataPart

PARTS = ((0, 128), (128, 256), (256, 384), (64, 300))


@pytest.fixture(params=["moments", "grams"])
def parts(request, tmp_path: Path) -> list[Path]:
    x, paths = inputs(384), []
    for start, stop in PARTS:
        paths.append(tmp_path / f"{start}.safetensors")
        memory = 10 if request.param == "grams" else None
        sosie.compare(mlp(0), mlp(1), DataPart(x[start:stop], start), resume=paths[-1], memory=memory)
    return paths


@pytest.mark.parametrize("chosen", [(0, 1, 1), (0, 0), (1, 0, 2, 0), (0, 3), (3, 2)])
def test_parts_that_share_rows_are_refused(parts: list[Path], chosen: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"more than once|begin with the same input|overlap"):
        sosie.compare([parts[k] for k in chosen])


def test_parts_in_any_order_with_gaps_are_merged(parts: list[Path]) -> None:
    assert sosie.compare([parts[2], parts[0], parts[1]])["debiased_cka"].n == 384
    assert sosie.compare([parts[0], parts[2]])["debiased_cka"].n == 256


def test_the_error_names_the_rows(parts: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"64 to 127.*DataPart"):
        sosie.compare([parts[0], parts[3]])


def test_a_merged_part_that_went_on_knows_its_rows(tmp_path: Path) -> None:
    x, paths = inputs(384), [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for stop in (100, 200):
        sosie.compare(mlp(0), mlp(1), x[:stop], resume=paths[0])
    sosie.compare(mlp(0), mlp(1), DataPart(x[150:], 150), resume=paths[1])
    with pytest.raises(ValueError, match="150 to 199"):
        sosie.compare(paths)


def test_parts_of_an_earlier_version_have_no_rows_and_merge() -> None:
    for kind in ("moments", "grams"):
        assert sosie.compare([HERE / f"{kind}_{part}.safetensors" for part in ("first", "second")])


def parts_of(tmp_path: Path, models: list[nn.Module], data: list[DataPart], **options) -> list[Path]:
    paths = [tmp_path / f"{k}.safetensors" for k in range(len(models))]
    for k, path in enumerate(paths):
        own = {name: each[k] for name, each in options.items()}
        sosie.compare(models[k], models[k], data[k], resume=path, **own)
    return paths


def halves(x: Tensor) -> list[DataPart]:
    half = len(x) // 2
    return [DataPart(x[:half], 0), DataPart(x[half:], half)]


def with_middle(layer: nn.Module) -> nn.Module:
    model = mlp(0)
    model[3] = layer
    return model


def test_other_networks_of_the_same_weights_are_refused(tmp_path: Path) -> None:
    models = [with_middle(nn.Tanh()), with_middle(nn.ReLU())]
    with pytest.raises(ValueError, match=r"not of the same comparison.*Sequential"):
        sosie.compare(parts_of(tmp_path, models, halves(inputs(256)), sites=["4", "4"]))


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sin(by * x)


@pytest.mark.parametrize("option", ["prepare_a", "inputs", "rows"])
def test_inputs_prepared_in_another_way_are_refused(tmp_path: Path, option: str) -> None:
    given = {option: [scaled(1), scaled(9)]}
    with pytest.raises(ValueError, match="not of the same comparison"):
        sosie.compare(parts_of(tmp_path, [mlp(0), mlp(0)], halves(inputs(256)), **given))


def test_the_same_networks_are_merged(tmp_path: Path) -> None:
    given = {"prepare_a": [scaled(2), scaled(2)]}
    assert sosie.compare(parts_of(tmp_path, [mlp(0), mlp(0)], halves(inputs(256)), **given))["debiased_cka"].n == 256


def test_random_networks_are_merged(tmp_path: Path) -> None:
    given = {"prepare_a": [torch.rand_like] * 2}
    assert sosie.compare(parts_of(tmp_path, [mlp(0), mlp(0)], halves(inputs(256)), **given))


def test_parts_of_texts_are_merged(tmp_path: Path) -> None:
    ids = torch.randint(1, 20, (128, 7), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": some, "attention_mask": torch.ones_like(some)} for some in ids.split(64)]
    data = [DataPart([batch], 64 * k) for k, batch in enumerate(batches)]
    paths = parts_of(tmp_path, [Tokens(0), Tokens(0)], data, rows=["mean", "mean"])
    assert sosie.compare(paths)["debiased_cka"].n == 128
