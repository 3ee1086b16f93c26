"""Models with masks, saved and read back: whole, or refused with names and shapes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from sparse_nets import batch, small
from torch import nn
from torch.nn.utils import prune

from sosie.train import random_masks
from sosie.train.sparse import load_masked


@pytest.mark.parametrize("where", ["state", "safetensors", "pt"])
def test_a_masked_model_is_read_back(where: str, tmp_path: Path) -> None:
    model = small()
    masks = random_masks(model, 0.8)
    state = model.state_dict()
    source: object = state
    if where == "safetensors":
        save_file(state, source := tmp_path / "masked.safetensors")
    elif where == "pt":
        torch.save(state, source := tmp_path / "masked.pt")
    fresh = small(1)
    found = load_masked(fresh, source)  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())
    assert found.densities() == masks.densities()
    load_masked(fresh, source)  # type: ignore[arg-type]  # masks it has are overwritten


def test_names_under_a_prefix_are_read() -> None:
    model = small()
    random_masks(model, 0.8)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    fresh = small(1)
    load_masked(fresh, state)
    assert torch.equal(fresh[6].weight, model[6].weight)


def test_what_torch_pruned_is_read() -> None:
    model, fresh = small().eval(), small(1).eval()
    prune.l1_unstructured(model[3], "weight", 0.5)
    masks = load_masked(fresh, model.state_dict())
    assert list(masks) == ["3"]
    assert masks.sparsity == 0.5
    x, _ = batch()
    assert torch.equal(fresh(x), model(x))


def refused(model: nn.Module, state: dict[str, torch.Tensor], words: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        load_masked(model, state)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = small()
    masks = random_masks(model, 0.8)
    state = model.state_dict()
    refused(small(), {k: v for k, v in state.items() if "mask" not in k}, "has no masks")
    refused(small(), {**state, "9.weight_mask": state["0.weight_mask"]}, "'9' is not a layer with a weight")
    refused(small(), {**state, "1.weight_mask": state["0.weight_mask"]}, "'1' is not a layer with a weight")
    wrong = {**state, "3.weight_mask": torch.ones(2, 2, dtype=torch.bool)}
    refused(small(), wrong, r"'3' has a weight \(8, 8, 3, 3\) but a mask \(2, 2\)")
    refused(small(), {k: v for k, v in state.items() if k != "6.bias"}, r"1 missing in the file: 6\.bias")
    grown = {**state, "0.weight": torch.ones_like(state["0.weight"])}
    refused(small(), grown, f"{int((~masks['0']).sum())} weights of '0' are not 0 where they are masked")
    refused(nn.Sequential(nn.Linear(3, 3)), state, "do not fit the model")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def test_tied_weights_are_read_back_from_a_file_that_has_them_once(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    masks = random_masks(model, 0.5)
    save_model(model, str(tmp_path / "tied.safetensors"))
    assert len(load_file(tmp_path / "tied.safetensors")) < len(model.state_dict())
    found = load_masked(fresh, tmp_path / "tied.safetensors")
    assert found.densities() == masks.densities()
    assert fresh.b.weight is fresh.a.weight
    x = torch.randn(4, 5)
    assert torch.equal(fresh(x), model(x))
    state = model.state_dict()
    refused(Tied(), {**state, "b.weight_mask": state["a.weight_mask"]}, "'b' shares the weight of 'a'")
    refused(Tied(), {k: v for k, v in state.items() if k not in ("a.weight", "b.weight")}, "2 missing in the file")
