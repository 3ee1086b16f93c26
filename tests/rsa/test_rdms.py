"""Dissimilarity matrices as objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform

import sosie
from sosie.files import DamagedFile
from sosie.rsa import RDMs, compare_rdms

random = np.random.default_rng(0)
STIMULI = ("cat", "dog", "owl", "car", "bus")


def rdms(count: int = 2, n: int = 5, seed: int = 0) -> RDMs:
    x = np.random.default_rng(seed).normal(size=(count, n, 4))
    return RDMs.of({f"s{k}": rows for k, rows in enumerate(x)}, "euclidean", stimuli=STIMULI if n == 5 else ())


@pytest.mark.parametrize(
    ("dissimilarity", "metric"),
    [
        ("euclidean", "euclidean"),
        ("squared_euclidean", "sqeuclidean"),
        ("correlation", "correlation"),
        ("cosine", "cosine"),
    ],
)
def test_of_activations_against_scipy(dissimilarity: str, metric: str) -> None:
    x = random.normal(size=(7, 4, 3))
    found = RDMs.of({"layer": x}, dissimilarity)
    assert found.values[0] == pytest.approx(pdist(x.reshape(7, -1), metric))
    assert found.matrices[0] == pytest.approx(squareform(pdist(x.reshape(7, -1), metric)))
    assert (found.names, found.dissimilarity, len(found.stimuli)) == (("layer",), dissimilarity, 7)


def test_of_activations_with_a_gradient() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    for dissimilarity in ("correlation", "euclidean"):
        expected = RDMs.of({"x": x.detach()}, dissimilarity)
        np.testing.assert_array_equal(RDMs.of({"x": x}, dissimilarity).values, expected.values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_of_activations_on_a_gpu() -> None:
    x = torch.randn(6, 4, device="cuda")
    assert RDMs.of({"x": x}).values == pytest.approx(RDMs.of({"x": x.cpu()}).values, abs=1e-12)


def test_of_a_file_of_activations(tmp_path: Path) -> None:
    x, y = random.normal(size=(2, 6, 3, 2, 2))
    np.savez(tmp_path / "acts.npz", a=x, b=y)
    found = RDMs.of(tmp_path / "acts.npz", "euclidean", rows="mean", sites="b")
    assert found.names == ("b",)
    assert found.values[0] == pytest.approx(pdist(y.mean((2, 3))))


def test_of_extracted_activations(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    sosie.extract(model, x, out=tmp_path / "acts.safetensors")
    found = RDMs.of(tmp_path / "acts.safetensors", "euclidean")
    with torch.no_grad():
        assert found["0"].values[0] == pytest.approx(pdist(model[0](x).numpy()), abs=1e-5)


def test_of_matrices_and_back() -> None:
    some = rdms()
    again = RDMs.from_matrices(some.matrices, stimuli=STIMULI, names=some.names)
    assert np.array_equal(again.values, some.values)
    assert np.array_equal(RDMs.from_matrices(dict(zip("ab", some.matrices, strict=True))).values, some.values)
    assert RDMs.from_matrices(some.matrices[0]).names == ("0",)


def test_selections_and_the_mean() -> None:
    some = rdms(3)
    part = some.select(["car", "cat", "dog"])
    assert part.stimuli == ("car", "cat", "dog")
    assert part.matrices == pytest.approx(some.matrices[:, [3, 0, 1]][:, :, [3, 0, 1]])
    assert some["s1"].names == ("s1",)
    assert some[["s2", "s0"]].names == ("s0", "s2")
    assert some["s*"].names == some.names
    assert [each.names for each in some] == [("s0",), ("s1",), ("s2",)]
    assert np.array_equal(RDMs.join(some).values, some.values)
    assert some.mean().values == pytest.approx(some.values.mean(0, keepdims=True))
    assert RDMs.join([some["s0"], some["s2"]]).values == pytest.approx(some.values[[0, 2]])
    assert RDMs.join({"a": some["s0"], "b": some["s2"]}).names == ("a", "b")
    with pytest.raises(ValueError, match="a holds 3 RDMs"):
        RDMs.join({"a": some})


def test_saved_and_loaded(tmp_path: Path) -> None:
    some = rdms()
    again = RDMs.load(some.save(tmp_path / "rdms.safetensors"))
    assert np.array_equal(again.values, some.values)
    assert (again.stimuli, again.names, again.dissimilarity) == (STIMULI, ("s0", "s1"), "euclidean")
    content = bytearray((tmp_path / "rdms.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "rdms.safetensors").write_bytes(content)
    with pytest.raises(DamagedFile, match="checksum"):
        RDMs.load(tmp_path / "rdms.safetensors")


@pytest.mark.parametrize(
    "compare", ["spearman", "rho_a", "pearson", "cosine", "whitened_cosine", "kendall", "kendall_b"]
)
def test_compared_as_the_measure_does(compare: str) -> None:
    x, y, z = random.normal(size=(3, 12, 5))
    a, b = RDMs.of({"x": x, "z": z}), RDMs.of({"y": y})
    found = compare_rdms(a, b, compare)
    assert found.shape == (2, 1)
    assert found[:, 0] == pytest.approx([sosie.measure("rsa", rows, y, compare=compare) for rows in (x, z)], abs=1e-12)


def test_seen() -> None:
    pytest.importorskip("matplotlib")
    figure = rdms(3).plot("s[01]")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:2] == ["s0", "s1"]
    assert np.array_equal(figure.axes[1].images[0].get_array(), rdms(3).matrices[1])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(STIMULI)
    assert "5: cat, dog" in rdms()._repr_html_()
    assert repr(rdms()) == "<RDMs of s0, s1: 5 stimuli, euclidean>"


def test_what_is_no_rdm_is_said() -> None:
    some = rdms()
    square = some.matrices[0]
    for matrices, message in (
        (square[:4], "square"),
        (square + np.triu(square), "not symmetric"),
        (1 - square / square.max(), "diagonal that is not 0"),
        (np.where(np.eye(5)[::-1] * (1 - np.eye(5)) > 0, np.nan, square), "NaN or infinite"),
        (square[:2, :2], "at least 3 stimuli, got 2"),
        ({"a": square, "b": square[:4, :4]}, "of different stimuli"),
    ):
        with pytest.raises(ValueError, match=message):
            RDMs.from_matrices(matrices)
    with pytest.raises(ValueError, match="5 dissimilarities are not those of all pairs"):
        RDMs(np.ones((1, 5)))
    with pytest.raises(ValueError, match="4 names for 5 stimuli"):
        RDMs.from_matrices(square, stimuli=STIMULI[:4])
    with pytest.raises(ValueError, match="same name: a"):
        RDMs.from_matrices(some.matrices, names=("a", "a"))
    with pytest.raises(KeyError, match="did you mean 'owl'"):
        some.select(["cat", "dog", "owls"])
    with pytest.raises(ValueError, match="at least 3 stimuli"):
        some.select(["cat", "dog"])
    with pytest.raises(ValueError, match="no RDM is called 'subject'"):
        some["subject"]
    with pytest.raises(TypeError, match="selected by name, not by number: there are s0, s1"):
        some[0]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"activations need a name: \{site: array\}, got an array of shape \(5, 3\)"):
        RDMs.of(np.ones((5, 3)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dissimilarity must be one of"):
        RDMs.of({"a": random.normal(size=(5, 3))}, "manhattan")
    with pytest.raises(ValueError, match="gives 24 rows for 6 stimuli"):
        RDMs.of({"a": random.normal(size=(6, 3, 2, 2))}, rows="positions")
    with pytest.raises(TypeError, match="values must be real numbers, got an array of complex128"):
        RDMs(some.values + 1j)
    for size in (1e-200, 1e200):
        with pytest.raises(ValueError, match=r"RDM 0 has dissimilarities up to .*: divide them by that"):
            RDMs(some.values * size)
        with pytest.raises(ValueError, match="the largest number in a is"):
            RDMs.of({"a": size * random.normal(size=(5, 3))})
    with pytest.raises(ValueError, match="of 'a' are NaN"):
        RDMs.of({"a": np.full((5, 3), np.nan)})


def test_rdms_of_other_stimuli_are_not_compared() -> None:
    some, turned = rdms(), rdms().select(STIMULI[::-1])
    with pytest.raises(ValueError, match="in another order"):
        compare_rdms(some, turned)
    assert np.allclose(compare_rdms(some, turned.select(some.stimuli)).diagonal(), 1)
    with pytest.raises(ValueError, match="different stimuli, 5 and 6"):
        compare_rdms(some, rdms(n=6))
    with pytest.raises(ValueError, match="compare must be one of"):
        compare_rdms(some, some, "cosin")
