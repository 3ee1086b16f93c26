"""What is done otherwise for many models finds what is found from all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_prints import INPUTS, SIZE, made, new_zoo
from test_questions import on_a_circle, one_site

from sosie.linalg import adjusted_rand_index, cluster, clusterings
from sosie.results import Clusters
from sosie.zoo import Fingerprint, Zoo, questions
from sosie.zoo.questions import farthest, near_models, of_all, of_some, scaled, similarities, square
from sosie.zoo.vectors import Vectors


def groups_on_a_circle(folder: Path, sizes: tuple[int, ...]) -> Zoo:
    """The first group has most members; each has its own angle, members are .01 apart."""
    angles = np.concatenate([0.5 * place + 0.001 * np.arange(size) for place, size in enumerate(sizes)])
    return on_a_circle(folder, np.random.default_rng(0).permutation(angles))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("k", [None, 5])
def test_clusters_from_landmarks_are_those_from_all_pairs(tmp_path: Path, seed: int, k: int | None) -> None:
    """Groups of one and two members among large ones: no draw of six is sure to have them."""
    zoo = groups_on_a_circle(tmp_path, (40, 25, 10, 2, 1))
    whole = zoo.clusters(k)
    found = zoo.clusters(k, landmarks=12, seed=seed)
    assert [sorted(group) for group in found.groups] == [sorted(group) for group in whole.groups]
    assert len(found.groups) == 5
    assert found.asked["landmarks"] == 12
    assert whole.asked["landmarks"] is None
    assert "Approximate" in found.notes[1]
    assert "from 12 of them" in found.sentence()
    assert len(whole.notes) == (2 if k is None else 1)
    assert sum(row["centre"] for row in found) == 5
    similar = {row["name"]: row["similarity"] for row in whole}
    for row in found:
        assert (row["similarity"] is None) is (similar[row["name"]] is None)
        if row["similarity"] is not None:
            assert row["similarity"] == pytest.approx(similar[row["name"]], abs=1e-3)
    assert Clusters.load(found.save(tmp_path / "c.json")) == found


def test_from_some_size_on_landmarks_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = groups_on_a_circle(tmp_path, (20, 10, 5))
    monkeypatch.setattr(questions, "MOST_CLUSTERED", 34)
    monkeypatch.setattr(questions, "LANDMARKS", 9)
    monkeypatch.setattr(questions, "BLOCK", 8)
    monkeypatch.setattr(questions, "ROUND", 2)
    monkeypatch.setattr(questions, "POOL", 5)
    found = zoo.clusters()
    assert found.asked["landmarks"] == 9
    assert sorted(map(len, found.groups)) == [5, 10, 20]
    assert zoo.clusters() == found
    with pytest.raises(ValueError, match=r"clusters .* from 1 to 9, got 10: .* landmarks="):
        zoo.clusters(10)
    with pytest.raises(ValueError, match=r"landmarks .* at least 3, got 2"):
        zoo.clusters(landmarks=2)
    monkeypatch.setattr(questions, "MOST_CLUSTERED", 35)
    assert zoo.clusters().asked["landmarks"] is None


@pytest.mark.parametrize("k", [None, 1, 4, 9])
def test_where_all_are_landmarks_nothing_is_approximate(tmp_path: Path, k: int | None) -> None:
    similarity = square(new_zoo(tmp_path, 10).store.vectors("cka"))
    whole, found = of_all(similarity, k), of_some(np.arange(10), similarity, k)
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_allclose(found[1], whole[1], atol=1e-12)
    assert found[2] == pytest.approx(whole[2], abs=1e-12)


def test_farthest_first(tmp_path: Path) -> None:
    """After the model at angle 0: the one at the other end, then the one in the middle."""
    zoo = on_a_circle(tmp_path, np.linspace(0, 2, 9))
    mapped = zoo.store.vectors("cka")
    near = similarities(mapped.part([0]), mapped)[:, 0]
    near[0] = np.inf
    assert farthest(mapped, near, 2).tolist() == [4, 8]
    assert sorted(farthest(mapped, near, 8).tolist()) == list(range(1, 9))
    assert farthest(mapped, near, 0).tolist() == []


def test_several_clusterings_are_each_its_own() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    for count, labels in zip((1, 3, 30), clusterings(x @ x.T, [1, 3, 30]), strict=True):
        assert adjusted_rand_index(labels, cluster(x @ x.T, count)) == 1
        assert len(labels.unique()) == count
    with pytest.raises(ValueError, match="into 31 groups"):
        clusterings(x @ x.T, [3, 31])


@pytest.mark.parametrize("tile", [1, 7, 1000])
def test_all_pairs_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:

    monkeypatch.setattr(questions, "TILE", tile)
    zoo = new_zoo(tmp_path)
    sites = [3, 1, 4, 1, 5, 2, 2, 3]
    prints = [made(k, sites=count) for k, count in enumerate(sites)]
    zoo.add({f"m{k}": one for k, one in enumerate(prints)})
    zoo.remove("m5")
    left = [one for k, one in enumerate(prints) if k != 5]
    found = square(zoo.store.vectors("cka"))
    for i, a in enumerate(left):
        for j, b in enumerate(left):
            cosines = a.cosine(b)
            wanted = 1 if i == j else (cosines.max(1).mean() + cosines.max(0).mean()) / 2
            assert found[i, j] == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 50])
def test_points_of_the_plane_keep_their_distances(n: int) -> None:
    plane = np.random.default_rng(n).normal(size=(n, 2))
    squared = np.square(plane[:, None] - plane[None]).sum(2)
    points, shares = scaled(squared)
    np.testing.assert_allclose(np.square(points[:, None] - points[None]).sum(2), squared, atol=1e-12 * n)
    assert n == 1 or sum(shares) == pytest.approx(1)


def test_points_that_are_all_one() -> None:
    points, shares = scaled(np.zeros((5, 5)))
    assert not points.any()
    assert shares == [0, 0]


def copies(seed: int, models: int, spread: float) -> Vectors:
    """Models in families of different sizes and numbers of sites, vectors of length 1."""
    random = np.random.default_rng(seed)
    family = random.integers(0, 6, models)
    count = 2 + family % 2
    base = random.normal(size=(6, 3, SIZE))
    noise = spread * random.normal(size=(models, 3, SIZE)) * random.integers(0, 3, models)[:, None, None]
    rows = np.concatenate([(base[f] + e)[:c] for f, e, c in zip(family, noise, count, strict=True)])
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return Vectors("cka", rows, np.arange(models) * 2, np.cumsum(count) - count, count)


@pytest.mark.parametrize(("spread", "least"), [(1e-3, 1 - 1e-5), (0.05, 0.99), (0.2, 0.9), (0.5, 0.6)])
@pytest.mark.parametrize("block", [4, 100])
def test_no_pair_that_is_near_is_missed(
    spread: float, least: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "BATCH", block)
    monkeypatch.setattr(questions, "STRIP", 3)
    monkeypatch.setattr(questions, "MOST_OTHERS", 5)
    monkeypatch.setattr(questions, "CHECKED", 2)
    mapped = copies(0, 60, spread)
    vectors = [mapped.rows[f : f + c].astype(float) for f, c in zip(mapped.first, mapped.count, strict=True)]
    wanted = {}
    for b, mine in enumerate(vectors):
        near = [a for a in range(b) if len(vectors[a]) == len(mine) and (vectors[a] * mine).sum(1).min() >= least]
        if near:
            wanted[2 * b] = [2 * a for a in near]
    assert 20 < sum(map(len, wanted.values())) < 60 * 59 / 4
    found = {model: others.tolist() for model, others in near_models(mapped, least - 1e-7, set())}
    assert found == wanted


def test_models_that_are_taken_are_left_out() -> None:
    mapped = copies(1, 40, 0.0)  # families of equals
    taken: set[int] = set()
    for model, others in near_models(mapped, 0.999, taken):
        assert not taken & set(others.tolist())
        taken.add(model)
    assert len(taken) == 40 - 6


def test_vectors_that_are_not_quite_of_length_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others may be longer by 1e-4: at the same product they are farther apart."""
    monkeypatch.setattr(questions, "BATCH", 1)
    least, length = 1 - 1e-5, 1.0001
    angle = np.arccos((least + 1e-6) / length**2)
    angles = np.array([0, angle, *np.linspace(0.5, 2, 20)])
    rows = np.zeros((22, SIZE), np.float32)
    rows[:, 0], rows[:, 1] = length * np.sin(angles), length * np.cos(angles)
    mapped = Vectors("cka", rows, np.arange(22), np.arange(22), np.ones(22, np.int64))
    found = [(a, b.tolist()) for a, b in near_models(mapped, least, set()) if a == 1]
    assert found == [(1, [0])]


def test_the_same_weights_are_found_by_their_digest(tmp_path: Path) -> None:
    """Also where the vectors are not alike; a removed one does not count."""
    zoo = new_zoo(tmp_path)
    vectors = np.random.default_rng(0).normal(size=(6, SIZE))
    for k, digest in enumerate((7, 7, 8, 7, 9, 9)):
        zoo.add(one_site(vectors[k], digest), f"n{k}", tags=["x"] if k else [])
    zoo.remove("n4")
    found = {row["name"]: (row["same_as"], row["why"]) for row in zoo.duplicates()}
    assert found == {"n1": ("n0", "same weights"), "n3": ("n0", "same weights")}
    assert {row["name"]: row["same_as"] for row in zoo.duplicates(tag="x")} == {"n3": "n1"}
    mine = zoo.duplicates()[0]["value"]
    a, b = (vector / np.linalg.norm(vector) for vector in vectors[:2])
    assert mine == pytest.approx(float(a @ b), abs=1e-6)


def test_a_zoo_of_one_is_asked(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    assert zoo.duplicates().rows() == []
    assert zoo.clusters().groups == [["m0"]]


def plain_search(zoo: Zoo, query: Fingerprint, k: int, symmetric: bool) -> list[tuple[str, float, float, str, str]]:
    """Model by model, as it is defined."""

    def match(table: np.ndarray) -> float:
        forth = float(np.mean([max(row) for row in table]))
        return (forth + float(np.mean([max(row) for row in table.T]))) / 2 if symmetric else forth

    found = []
    for name in zoo:
        other = zoo[name].fingerprint
        short = query.cosine(other)
        table = short if other.exact is None else query.cosine(other, exact=True)
        a, b = np.unravel_index(table.argmax(), table.shape)
        found.append((name, match(table), match(short), query.labels["cka"][a], other.labels["cka"][b]))
    return sorted(found, key=lambda one: -one[1])[:k]


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_search_is_what_a_loop_gives(tmp_path: Path, symmetric: bool) -> None:
    """Models with and without whole vectors, different numbers of sites, gaps of removed ones."""
    from dataclasses import replace

    zoo = Zoo(tmp_path / "zoo", INPUTS, size=SIZE)
    prints = {f"m{k}": made(k, sites=1 + k % 5) for k in range(30)}
    zoo.add({name: replace(one, exact=None) if k % 4 == 1 else one for k, (name, one) in enumerate(prints.items())})
    zoo.remove("m3", "m4", "m20")
    query = made(50, sites=4)
    found = zoo.search(query, k=12, symmetric=symmetric)
    for row, wanted in zip(found, plain_search(zoo, query, 12, symmetric), strict=True):
        assert (row["name"], row["site_a"], row["site_b"]) == (wanted[0], *wanted[3:])
        assert row["value"] == pytest.approx(wanted[1], abs=1e-12)
        assert row["estimated"] == pytest.approx(wanted[2], abs=1e-12)
        assert row["exact"] is (zoo[row["name"]].fingerprint.exact is not None)
    assert {row["exact"] for row in found} == {True, False}


def test_what_is_kept_is_forgotten_when_the_zoo_changes(tmp_path: Path) -> None:
    zoo, writer = new_zoo(tmp_path, 6), Zoo(tmp_path / "zoo")
    found = zoo.search(made(2), k=1)[0]
    assert found["tags"] == []
    found["tags"].append("mine")  # an answer is the asker's own
    assert zoo.search(made(2), k=1)[0]["tags"] == []
    writer.tag("m2", add="x")
    assert zoo.search(made(2), k=1)[0]["tags"] == ["x"]
    writer.remove("m2")
    assert zoo.search(made(2), k=1)[0]["name"] != "m2"
