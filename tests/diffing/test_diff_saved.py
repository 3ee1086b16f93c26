"""Saved activations on either side of a diff: what another framework gave for the same inputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffed_nets import Net, edited, images, jiggled

import sosie
from sosie.diffing import record

A = jiggled(Net())
X = images()
WRONG = edited(A, lambda b: b.block2.conv.weight.data.mul_(1.01))
SITES = ("block1", "block2", "block3")


def activations(model: Any, *, channels_last: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    hooks = [
        model.get_submodule(site).register_forward_hook(lambda m, i, y, site=site: found.update({site: y.numpy()}))
        for site in SITES
    ]
    with torch.no_grad():
        found["output"] = model(X).numpy()
    for hook in hooks:
        hook.remove()
    return {site: x.transpose(0, 2, 3, 1) if channels_last and x.ndim == 4 else x for site, x in found.items()}


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_model_is_held_against_what_was_saved(channels_last: bool, tmp_path: Path) -> None:
    saved = activations(A, channels_last=channels_last)
    np.savez(tmp_path / "a.npz", **saved)  # type: ignore[arg-type]
    for given in (saved, tmp_path / "a.npz"):
        for pair in ((given, A), (A, given)):
            d = sosie.diff(*pair, X)
            assert d.same, d.verdict
            assert {site.site_a for site in d.sites} == {*SITES, "output"}
        for pair in ((given, WRONG), (WRONG, given)):
            d = sosie.diff(*pair, X)
            assert (d.same, d.first) == (False, "block2"), d.verdict
            assert d.verdict.endswith("whether it makes that error or inherits it is not known.")
    assert d.outputs
    with pytest.raises(AssertionError, match="Different from block2 on"):
        sosie.assert_same(WRONG, tmp_path / "a.npz", X)


def test_two_files_need_no_data(tmp_path: Path) -> None:
    for name, model in (("a", A), ("b", WRONG)):
        np.savez(tmp_path / f"{name}.npz", **activations(model))  # type: ignore[arg-type]
    assert sosie.diff(tmp_path / "a.npz", tmp_path / "a.npz").same
    d = sosie.diff(tmp_path / "a.npz", tmp_path / "b.npz")
    assert (d.same, d.first, d.floor) == (False, "block2", "the rounding of the type alone")
    without = {site: x for site, x in activations(WRONG).items() if site != "output"}
    assert not sosie.diff(activations(A), without).same  # the last site may be before the fault is made good


def test_files_of_extract(tmp_path: Path) -> None:
    path, mean = tmp_path / "a.safetensors", tmp_path / "mean.safetensors"
    sosie.extract(A, X, out=path)
    assert sosie.diff(path, A, X).same  # rows are flattened there
    assert not sosie.diff(path, WRONG, X).same
    assert any("first inputs differ" in caveat for caveat in sosie.diff(path, A, X.flip(0)).caveats)
    sosie.extract(A, X, out=mean, rows="mean")
    with pytest.raises(ValueError, match=r"rows made by 'mean'.*rows='flatten'"):
        sosie.diff(mean, A, X)
    with pytest.raises(ValueError, match=r"holds \d+ inputs, but the data go on"):
        sosie.diff(path, A, torch.cat([X, X]))


def test_two_records(tmp_path: Path) -> None:
    """A model that was recorded on two machines."""
    a, same, wrong, other = (tmp_path / f"{k}.safetensors" for k in range(4))
    record(A, X, a)
    record(copy.deepcopy(A), X, same)
    record(WRONG, X, wrong)
    record(A, X.flip(0), other)
    assert sosie.diff(a, same).same
    assert sosie.diff(a, wrong).first == "block2"
    with pytest.raises(ValueError, match="a record of other inputs than"):
        sosie.diff(a, other)
