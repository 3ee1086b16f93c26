"""Fingerprints against debiased CKA, wCKA and atom cosine; what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import sosie
from sosie.cli.main import app
from sosie.models import atom_layers, open_model, share_coefficients, with_atoms
from sosie.zoo import Fingerprint, NotComparable, Probe, Zoo, fingerprint, fingerprints


def images(n: int = 48, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def cnn(seed: int) -> nn.Module:
    return open_model(f"small_cnn(seed={seed})").model


def perceptron(seed: int, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 5))


def test_the_cosine_of_exact_vectors_is_debiased_cka() -> None:
    a, b, probe = cnn(0), cnn(1), images()
    x, y = (fingerprint(model, probe, kinds="cka") for model in (a, b))
    compared = sosie.compare(a, b, probe, measures=["debiased_cka"], precision="float64")
    assert x.sites == list(compared.sites_a)
    assert x.exact is not None
    assert x.exact.shape == (len(x.sites), 48 * 47 // 2)
    np.testing.assert_allclose(x.cosine(y, exact=True), compared.matrix("debiased_cka"), atol=1e-6)
    np.testing.assert_allclose(np.diag(x.cosine(x, exact=True)), 1, atol=1e-6)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_exact_vectors_against_the_measure_itself(offset: float, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpu`: by the way that a GPU without Triton goes."""
    if gpu:
        monkeypatch.setattr(fingerprints, "_gram", fingerprints._gram_on_gpu)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3)).eval()
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model[0].bias += offset
        first = model[0](rows)
        second = model[1](first)
    found = fingerprint(model, rows, kinds="cka")
    expected = sosie.measure("debiased_cka", first.double(), second.double())
    assert found.cosine(found, exact=True)[0, 1] == pytest.approx(expected, abs=1e-5 if offset else 1e-6)


def test_the_batches_do_not_matter_and_neither_do_labels() -> None:
    probe = images()
    labels = torch.arange(48) % 10
    whole = fingerprint(cnn(0), probe, kinds="cka")
    parts = fingerprint(cnn(0), [(probe[:31], labels[:31]), (probe[31:], labels[31:])], kinds="cka")
    assert parts.probe == whole.probe
    np.testing.assert_array_equal(parts.vectors["cka"], whole.vectors["cka"])
    assert Probe.of(probe.flip(0)).digest != whole.probe
    assert Probe.of(probe.double()).digest != whole.probe
    assert Probe.of(probe, most=16).n == 16


def test_few_probes_need_no_projection() -> None:
    x, y = (fingerprint(cnn(seed), images(24), kinds="cka") for seed in (0, 1))  # 276 pairs of 24 probes
    np.testing.assert_allclose(x.cosine(y), x.cosine(y, exact=True), atol=1e-6)


def test_it_leaves_the_model_and_the_random_state_as_found() -> None:
    model = cnn(0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    fingerprint(model, images())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_atoms_are_atom_cosine_and_only_of_shared_coefficients() -> None:
    a, b, c = (with_atoms(cnn(seed), 6) for seed in range(3))
    share_coefficients(a, [b])
    x, y, other = (fingerprint(model, images(8), kinds="atoms") for model in (a, b, c))
    compared = sosie.compare_weights(a, b, measures=["atom_cosine"])
    sites = list(atom_layers(a))
    expected = compared.matrix("atom_cosine")[: len(sites), : len(sites)]
    np.testing.assert_allclose(x.cosine(y, "atoms"), expected, atol=1e-6)
    assert np.isnan(x.cosine(y, "atoms")).sum() == len(sites) ** 2 - len(sites)
    assert x.key("atoms").startswith("atoms-")
    with pytest.raises(NotComparable, match="different coefficients"):
        x.cosine(other, "atoms")


def test_what_a_model_does_not_have_is_absent_with_the_reason() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.first(x))
            return out

    found = fingerprint(Normed(), torch.randn(9, 6, generator=torch.Generator().manual_seed(0)))
    assert list(found.vectors) == ["cka"]
    assert "not linear in the input" in found.absent["weights"]
    assert "no layer of filter atoms" in found.absent["atoms"]
    with pytest.raises(NotComparable, match="not linear in the input"):
        found.cosine(found, "weights")
    with pytest.raises(ValueError, match="nothing to make a fingerprint of"):
        fingerprint(Normed(), torch.randn(9, 6), kinds=["weights", "atoms"])


@pytest.mark.parametrize("gpu", [False, True])
def test_a_dead_layer_is_left_out_and_named(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu:
        monkeypatch.setattr(fingerprints, "_gram", fingerprints._gram_on_gpu)
    model = perceptron(0)
    with torch.no_grad():
        model[0].bias -= 1e4
    found = fingerprint(model, torch.randn(12, 10, generator=torch.Generator().manual_seed(0)), kinds="cka")
    assert found.sites == ["0"]
    assert found.about["left_out"]["cka"] == dict.fromkeys(("1", "2"), "is the same for all probes")
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(ValueError, match="no site is left"):
        fingerprint(model, torch.randn(12, 10), kinds="cka")


def test_two_fingerprints_of_other_making_are_refused() -> None:
    first = fingerprint(cnn(0), images(), kinds="cka")
    other = fingerprint(cnn(0), images(seed=1), kinds="cka")
    with pytest.raises(NotComparable, match=f"{first.probe} and {other.probe}"):
        first.cosine(other)
    for change in ({"seed": 1}, {"size": 256}, {"rows": "mean"}):
        with pytest.raises(NotComparable, match=next(iter(change))):
            first.cosine(fingerprint(cnn(0), images(), kinds="cka", **change))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        fingerprint(cnn(0), images(3))
    with pytest.raises(ValueError, match="one row per input"):
        fingerprint(cnn(0), images(8), sites=["conv2"], rows="positions")
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        fingerprint(cnn(0), images(8) * float("nan"), kinds="cka")
    with pytest.raises(ValueError, match="did you mean 'cka'"):
        fingerprint(cnn(0), images(8), kinds="ckas")
    with pytest.raises(ValueError, match=r"size .* got 3"):
        fingerprint(cnn(0), images(8), size=3)
    with pytest.raises(TypeError, match="give a torch"):
        fingerprint({"w": torch.ones(2)}, images(8))


def test_at_most_sixty_four_sites() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Linear(5, 5) for _ in range(70)))
    for layer in deep:
        nn.init.orthogonal_(layer.weight)
    rows = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = fingerprint(deep.double(), rows, kinds="cka")
    assert len(found.sites) == 64
    assert found.sites[0] == "0"
    assert found.sites[-1] == "69"
    assert found.about["notes"] == ["cka: 64 of 70 sites, evenly spread"]
    with pytest.raises(ValueError, match="70 sites"):
        fingerprint(deep, rows, kinds="cka", sites="leaves")


def test_a_specification_and_repr() -> None:
    found = fingerprint("small_cnn(seed=0)", images(8), kinds="cka")
    assert isinstance(found, Fingerprint)
    assert "cka 12 × 512" in repr(found)
    assert found.about["parameters"] == sum(p.numel() for p in cnn(0).parameters())
    assert found.about["model"] != fingerprint("small_cnn(seed=1)", images(8), kinds="cka").about["model"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same() -> None:
    probe = images()
    there, here = (fingerprint(cnn(0), probe, kinds="cka", device=device) for device in ("cuda", "cpu"))
    assert there.probe == here.probe
    np.testing.assert_allclose(np.diag(there.cosine(here, exact=True)), 1, atol=1e-5)


def test_sites_of_several_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(6, 5), nn.Linear(5, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.high(self.low(x).double())
            return out

    found = fingerprint(Mixed(), torch.randn(9, 6, generator=torch.Generator().manual_seed(0)), kinds="cka")
    assert found.sites == ["low", "high"]


@pytest.mark.parametrize(("kind", "why"), [("weights", "has no shape yet"), ("atoms", "no layer of filter atoms")])
def test_a_lazy_model_says_what_it_lacks(kind: str, why: str) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(8))
    with pytest.raises(ValueError, match=why):
        fingerprint(model, torch.randn(20, 16), kinds=kind)


def test_random_weights_are_said_in_the_fingerprint_and_the_list(tmp_path):
    images = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert fingerprint("small_cnn(seed=3)", images).about["notes"][0] == "random weights (seed 3)"
    zoo = Zoo(tmp_path / "zoo", data=images)
    zoo.add("small_cnn(seed=3)", name="random")
    zoo.add(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), name="own")
    notes = {row["name"]: row["notes"] for row in zoo.list()}
    assert notes["random"][0] == "random weights (seed 3)"
    assert notes["own"] == []
    found = CliRunner().invoke(app, ["zoo", "list", str(tmp_path / "zoo")])
    assert "- random weights (seed 3): random\n" in found.output
