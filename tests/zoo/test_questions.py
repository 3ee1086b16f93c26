"""Questions about all models: against known geometry, other implementations, and networks with known relations."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from made_prints import PROBE, SIZE, made, new_zoo
from torch import nn

import sosie
from sosie.files import DamagedFile
from sosie.results import Clusters, Duplicates, Family, Map
from sosie.shapes import medoids, spherical_mds
from sosie.zoo import Fingerprint, Zoo, questions
from sosie.zoo.questions import measured, oriented, placed, scaled, similarities


def one_site(vector: np.ndarray, seed: int = 0) -> Fingerprint:
    """A fingerprint of one site whose short vector is this one."""
    short = (vector / np.linalg.norm(vector)).astype(np.float32)[None]
    about = {"architecture": "Made", "parameters": 1, "model": f"{seed:016x}", "sosie": "0"}
    return Fingerprint(PROBE.digest, PROBE.n, SIZE, 0, "flatten", {"cka": short}, {"cka": ("site",)}, None, {}, about)


def on_a_circle(folder: Path, angles: np.ndarray) -> Zoo:
    zoo = new_zoo(folder)
    vectors = np.zeros((len(angles), SIZE))
    vectors[:, 0], vectors[:, 1] = np.cos(angles), np.sin(angles)
    zoo.add({f"c{k}": one_site(vector, k) for k, vector in enumerate(vectors)})
    return zoo


def apart(found: Map) -> np.ndarray:
    points = np.array([[row["x"], row["y"]] for row in found])
    return np.linalg.norm(points[:, None] - points[None], axis=2)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def zoo_of_nets(folder: Path) -> Zoo:
    return Zoo(folder / "zoo", torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), size=64)


def moved(model: nn.Module, by: float, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weights in other.parameters():
            weights += by * torch.randn_like(weights)
    return other


def test_similarities_of_whole_models(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add({f"m{k}": made(k, sites=1 + k % 4) for k in range(9)})
    zoo.remove("m4")
    mapped = zoo.store.vectors("cka")
    found = similarities(mapped, mapped)
    left = [k for k in range(9) if k != 4]
    for i, a in enumerate(left):
        for j, b in enumerate(left):
            cosines = made(a, sites=1 + a % 4).cosine(made(b, sites=1 + b % 4))
            assert found[i, j] == pytest.approx((cosines.max(1).mean() + cosines.max(0).mean()) / 2, abs=1e-6)


@pytest.mark.parametrize("landmarks", [None, 5])
def test_what_lies_in_a_plane_is_mapped_as_it_lies(tmp_path: Path, landmarks: int | None) -> None:
    angles = np.linspace(0, 2.5, 12)
    zoo = on_a_circle(tmp_path, angles)
    found = zoo.map(landmarks=landmarks)
    chords = 2 * np.abs(np.sin((angles[:, None] - angles[None]) / 2))  # √(2 − 2 cos)
    np.testing.assert_allclose(apart(found), chords, atol=1e-3)
    assert found.stress < 1e-3
    assert found.asked["landmarks"] == landmarks
    assert Map.load(found.save(tmp_path / "map.json")) == found
    assert sosie.load(tmp_path / "map.json") == found
    assert zoo.map(landmarks=landmarks) == found
    with pytest.raises(DamagedFile, match="holds Map, not Clusters"):
        Clusters.load(tmp_path / "map.json")


def test_landmarks_are_placed_where_they_are() -> None:
    points = np.random.default_rng(0).normal(size=(8, 2))
    squared = np.square(points[:, None] - points[None]).sum(2)
    anchors, _ = scaled(squared)
    np.testing.assert_allclose(placed(anchors, squared, squared), anchors, atol=1e-12)


def test_the_stress_is_that_of_the_points(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 7)
    found = zoo.map()
    mapped = zoo.store.vectors("cka")
    true = np.sqrt(np.maximum(2 - 2 * similarities(mapped, mapped), 0))
    np.fill_diagonal(true, 0)
    wanted = np.sqrt(((apart(found) - true) ** 2).sum() / (true**2).sum())
    assert found.stress == pytest.approx(wanted, abs=1e-6)
    assert found.stress > 0.1  # random vectors do not lie in a plane


def test_similarities_of_all_pairs_and_what_shapes_make_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    angles = np.array([0.0, 0.1, 0.2, 1.5, 1.6, 2.5])
    zoo = on_a_circle(tmp_path, angles)
    names, similarity = zoo.similarities()
    assert names == tuple(f"c{k}" for k in range(6))
    np.testing.assert_allclose(similarity, np.cos(angles[:, None] - angles[None]), atol=1e-6)
    far = np.arccos(similarity.clip(-1, 1))
    points, stress = spherical_mds(far, 1)
    assert stress < 1e-3
    np.testing.assert_allclose(points @ points.T, similarity, atol=1e-3)
    labels, centres = medoids(far, 3)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert names[centres[0]] == "c1"
    monkeypatch.setattr(questions, "MOST_CLUSTERED", 5)
    with pytest.raises(ValueError, match="all pairs of 6 models: filter them to 5 or fewer"):
        zoo.similarities()


def test_a_map_of_few_models_and_its_orientation(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    assert [(row["x"], row["y"]) for row in zoo.map()] == [(0, 0)]
    zoo.add(made(1), "m1")
    first, second = zoo.map().rows()
    assert first["y"] == second["y"] == 0
    assert first["x"] == pytest.approx(-second["x"])
    points = np.random.default_rng(0).normal(size=(9, 2))
    np.testing.assert_array_equal(oriented(points), oriented(points * [-1, 1]))
    with pytest.raises(ValueError, match="no model has the tag 'none'"):
        zoo.map(tag="none")
    with pytest.raises(ValueError, match=r"landmarks .* at least 3, got 2"):
        zoo.map(landmarks=2)


def test_clusters_that_were_put_there(tmp_path: Path) -> None:
    angles = np.concatenate([np.arange(4) * 0.02 + place for place in (0.0, 1.0, 2.0)])
    zoo = on_a_circle(tmp_path, angles)
    found = zoo.clusters()
    assert found.asked["clusters"] == 3
    wanted = [{f"c{k}" for k in range(first, first + 4)} for first in (0, 4, 8)]
    assert [set(group) for group in found.groups] == wanted
    assert [row["cluster"] for row in found if row["centre"]] == [0, 1, 2]
    assert len(zoo.clusters(5).groups) == 5
    assert len(zoo.clusters(1).groups) == 1
    assert Clusters.load(found.save(tmp_path / "c.json")) == found
    with pytest.raises(ValueError, match=r"clusters .* from 1 to 12, got 13"):
        zoo.clusters(13)


def test_silhouettes_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(1)
    points = random.normal(size=(30, 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    labels = random.integers(0, 4, 30)
    labels[0] = 4  # one alone
    wanted = metrics.silhouette_score(distance, labels, metric="precomputed")
    assert measured(1 - distance, labels)[2] == pytest.approx(wanted, abs=1e-12)


def test_duplicates_are_found_and_others_are_not(tmp_path: Path) -> None:
    """A copy, one with its neurons in another order and rescaled: the same; another seed, and one trained on: not."""
    base = net(0)
    turned = copy.deepcopy(base)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        turned[0].weight.copy_(base[0].weight[order] * 2)
        turned[0].bias.copy_(base[0].bias[order] * 2)
        turned[2].weight.copy_(base[2].weight[:, order] / 2)
    zoo = zoo_of_nets(tmp_path)
    zoo.add({"base": base, "copy": copy.deepcopy(base), "turned": turned, "other": net(1), "tuned": moved(base, 0.05)})
    found = zoo.duplicates()
    assert [(row["name"], row["same_as"], row["why"]) for row in found] == [
        ("copy", "base", "same weights"),
        ("turned", "base", "alike at every site"),
    ]
    assert all(row["value"] >= 1 - 1e-5 and row["exact"] for row in found)
    assert [row["name"] for row in zoo.duplicates(0.9)] == ["copy", "turned", "tuned"]
    assert Duplicates.load(found.save(tmp_path / "d.json")) == found
    with pytest.raises(ValueError, match=r"threshold .* from 0.5 to 1, got 2"):
        zoo.duplicates(2)


def test_short_vectors_lose_no_duplicate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one model, and thresholds in between: as many as the whole vectors have, pair by pair."""
    monkeypatch.setattr(questions, "BATCH", 3)
    monkeypatch.setattr(questions, "STRIP", 2)
    base = net(0)
    zoo = zoo_of_nets(tmp_path)
    zoo.add({f"n{k}": moved(base, 0.01 * k, seed=k) for k in range(8)})
    prints = {name: zoo[name].fingerprint for name in zoo}
    for threshold in (0.9, 0.97, 0.995):
        wanted, leaders = [], []
        for name, one in prints.items():
            near = [old for old in leaders if prints[old].cosine(one, exact=True).diagonal().min() >= threshold]
            leaders += [] if near else [name]
            wanted += [(name, near[0])] if near else []
        assert [(row["name"], row["same_as"]) for row in zoo.duplicates(threshold)] == wanted
        assert 0 < len(wanted) < 7


def test_the_base_of_a_fine_tuned_model(tmp_path: Path) -> None:
    zoo = zoo_of_nets(tmp_path)
    bases = {f"base{k}": net(k) for k in range(4)}
    zoo.add(bases)
    zoo.add(moved(bases["base2"], 0.05), "child", parent="base1")  # recorded wrongly
    zoo.add(moved(bases["base2"], 0.05, seed=5), "sister", parent="base1")
    zoo.add(nn.Sequential(nn.Flatten(), nn.Linear(3, 4)), "other")
    found = zoo.family("child", k=2)
    assert {row["name"] for row in found.rows()[:2]} == {"base2", "sister"}
    assert {row["name"]: row["recorded"] for row in found} == {"base1": "parent", "base2": None, "sister": "sibling"}
    best = zoo["child"].fingerprint
    for row in found:
        other = zoo[row["name"]].fingerprint
        assert row["cka"] == pytest.approx(best.cosine(other, exact=True).diagonal().mean(), abs=1e-12)
        assert row["weights"] == pytest.approx(best.cosine(other, "weights").diagonal().mean(), abs=1e-6)
        assert row["early"] == pytest.approx(best.cosine(other, exact=True).diagonal()[:2].mean(), abs=1e-12)
        assert row["score"] == pytest.approx((row["cka"] + row["weights"]) / 2)
    assert zoo.family("base1", k=1).rows()[-1]["recorded"] == "child"
    assert zoo.family(moved(bases["base3"], 0.02), k=1)[0]["name"] == "base3"
    assert Family.load(found.save(tmp_path / "f.json")) == found
    assert "Recorded as its parent: base1" in found.sentence()


def test_atoms_meet_at_their_own_layer(tmp_path: Path) -> None:
    from sosie.models import AtomConv2d

    def atoms(seed: int, coefficients: int = 0) -> nn.Sequential:
        torch.manual_seed(coefficients)
        model = nn.Sequential(AtomConv2d(1, 4, 3, atoms=3), nn.ReLU(), AtomConv2d(4, 4, 3, atoms=3))
        torch.manual_seed(100 + seed)
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.atoms)
        return model

    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    zoo = Zoo(tmp_path / "z", images, size=64, kinds=("cka", "atoms"))
    zoo.add({f"a{k}": atoms(k) for k in range(4)})
    zoo.add(atoms(0, coefficients=1), "stranger")
    found = zoo.search("a0", kind="atoms")
    assert sorted(found.names) == ["a1", "a2", "a3"]
    mine = zoo["a0"].fingerprint
    for row in found:
        assert row["value"] == pytest.approx(np.nanmean(mine.cosine(zoo[row["name"]].fingerprint, "atoms")), abs=1e-9)
        assert row["site_a"] == row["site_b"]
    layers = zoo.search("a0", kind="atoms", by="layer")
    assert all(row["site_a"] == row["site_b"] for row in layers)
    assert len(layers) == 6
    with pytest.raises(ValueError, match="2 different sets of coefficients"):
        zoo.map("atoms")
    key = mine.key("atoms")
    mapped = zoo.store.vectors(key)
    again = similarities(mapped, mapped)
    assert again[0, 1] == pytest.approx({row["name"]: row["value"] for row in found}["a1"], abs=1e-6)
    assert len(zoo.map(key)) == 4
