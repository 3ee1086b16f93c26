"""Which model for my data: against the scores one by one, refits one by one, and a model that knows the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sosie
from sosie.models import open_model
from sosie.results import Recommendation, over_sites
from sosie.sketching.classifiers import GRID
from sosie.zoo import Zoo
from sosie.zoo.recommend import left_out_accuracy

SPEC = "small_cnn"


def labelled(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes on three axes, with noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    return 2 * torch.eye(3)[labels] + torch.randn(n, 3, generator=random), labels


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def test_left_out_in_closed_form_is_left_out_one_by_one() -> None:
    x, labels = labelled(18)
    x = torch.cat([x, x[:, :1] ** 2, torch.randn(18, 20, generator=torch.Generator().manual_seed(1))], 1).double()
    targets = torch.eye(3, dtype=torch.float64)[labels]
    centred = x - x.mean(0)
    mean = float(torch.linalg.eigvalsh(centred @ centred.T).mean())
    best, share = float("inf"), 0.0
    for penalty in GRID:
        answers = []
        for i in range(18):
            kept = torch.arange(18) != i
            middle, centre = x[kept].mean(0), targets[kept].mean(0)
            a, t = x[kept] - middle, targets[kept] - centre
            # The penalty is that of all rows: it is not chosen anew for each.
            weights = torch.linalg.solve(a.T @ a + penalty * mean * torch.eye(24, dtype=torch.float64), a.T @ t)
            answers.append(centre + (x[i] - middle) @ weights)
        found = torch.stack(answers)
        error = float((found - targets).square().sum())
        if error < best:
            best, share = error, float((found.argmax(1) == labels).double().mean())
    assert left_out_accuracy(x, labels) == share
    assert 0.4 < share < 1


def test_a_probe_finds_classes_and_nothing_where_there_is_nothing() -> None:
    x, labels = labelled(60)
    assert left_out_accuracy(20 * torch.eye(3)[labels] + x, labels) == 1
    noise = torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    assert left_out_accuracy(noise, torch.arange(600) % 3) < 0.42
    with pytest.raises(ValueError, match="all 60 rows"):
        left_out_accuracy(torch.ones(60, 2), labels)
    with pytest.raises(ValueError, match="of 1 classes"):
        left_out_accuracy(x, torch.zeros(60))


def test_the_least_to_adapt_comes_first(tmp_path: Path) -> None:
    x, _ = labelled()
    nets = {f"n{k}": net(k) for k in range(4)}
    zoo = Zoo(tmp_path / "z", x, size=64)
    zoo.add(nets)
    found = zoo.recommend([x], k=3, models=nets)
    wanted = {name: over_sites(sosie.transfer(one, [x]), "mean_embedding") for name, one in nets.items()}
    assert [row["name"] for row in found] == sorted(wanted, key=lambda name: wanted[name])[:3]
    assert [row["rank"] for row in found] == [1, 2, 3]
    for row in found:
        assert row["mean_embedding"] == pytest.approx(wanted[row["name"]])
        assert row["probe_accuracy"] is None
    assert Recommendation.load(found.save(tmp_path / "r.json")) == found


def test_with_labels_a_probe_decides(tmp_path: Path) -> None:
    x, labels = labelled(90)
    blind = net(1)
    with torch.no_grad():
        blind[0].weight[:, 1:] = 0  # sees one of three axes
    nets = {"blind": blind, "seeing": net(0)}
    zoo = Zoo(tmp_path / "z", x[:32], size=64)
    zoo.add(nets)
    data = [(x[:50], labels[:50]), (x[50:], labels[50:])]
    found = zoo.recommend(data, models=nets, probe_layer=0)
    assert [row["name"] for row in found] == ["seeing", "blind"]
    for row in found:
        rows = nets[row["name"]][0](x).detach()
        assert row["probe_accuracy"] == left_out_accuracy(rows, labels)
        assert row["probe_site"] == "0"
    assert found.asked["by"] == "probe_accuracy"
    assert "seeing comes first by probe_accuracy" in found.sentence()
    assert "equal ones by mean_embedding" in found.notes[0]
    told = zoo.recommend([x], models=nets, probe_layer=0)
    assert all("no labels" in row["reason"] for row in told)
    with pytest.raises(ValueError, match="needs a probe layer"):
        zoo.recommend(data, models=nets, by="probe_accuracy")


def test_a_probe_needs_no_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    ids = torch.randint(1, 20, (40, 5), generator=torch.Generator().manual_seed(0))
    zoo = Zoo(tmp_path / "z", [{"input_ids": ids}], size=64, rows="mean")
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    zoo.add({"bert": f"hf:{tmp_path / 'bert'}"})
    data = [({"input_ids": ids}, ids[:, 0] % 2)]
    (row,) = zoo.recommend(data, probe_layer=-1)
    assert (row["rank"], row["reason"], row["probe_site"]) == (1, None, "encoder.layer.1")
    assert row["mean_embedding"] is None
    (row,) = zoo.recommend(data)
    assert "--probe-layer -1 (probe_layer=-1) needs no head" in row["reason"]


def test_models_that_a_probe_cannot_tell_apart_go_by_what_they_would_adapt(tmp_path: Path) -> None:
    x, labels = labelled(60)
    nets = {f"n{k}": net(k) for k in range(4)}
    zoo = Zoo(tmp_path / "z", x[:32], size=64)
    zoo.add(nets)
    far = x + 10 * torch.nn.functional.one_hot(labels, 3)  # classes so far apart that all get them right
    found = zoo.recommend([(far, labels)], models=nets, probe_layer=0)
    assert {row["probe_accuracy"] for row in found} == {1.0}
    scores = [row["mean_embedding"] for row in found]
    assert scores == sorted(scores)
    assert [row["name"] for row in found] != sorted(nets)


def test_models_are_opened_again_from_their_source(tmp_path: Path) -> None:
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model = open_model(SPEC).model
    weights = tmp_path / "w.safetensors"
    save_file(model.state_dict(), weights)
    code = tmp_path / "own.py"
    code.write_text(
        "import pathlib\nfrom torch.nn import Flatten, Linear, Sequential\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        "def make():\n    return Sequential(Flatten(), Linear(784, 4))\n"
    )
    zoo = Zoo(tmp_path / "z", x, size=64, kinds="cka")
    zoo.add({"kept": f"{SPEC}@{weights}", "code": f"{code}:make"})
    zoo.add(open_model(f"{SPEC}(seed=3)").model, "no source")
    zoo.add(open_model(f"{SPEC}(seed=4)").model, "gone", source=f"{SPEC}@{tmp_path}/none.safetensors")
    zoo.add(open_model(f"{SPEC}(seed=5)").model, "changed", source=f"{SPEC}@{weights}")
    (tmp_path / "ran").unlink()
    found = {row["name"]: row for row in zoo.recommend([x])}
    assert found["kept"]["rank"] == 1
    assert {name for name, row in found.items() if row["rank"] is None} == {"code", "no source", "gone", "changed"}
    assert "Python code" in found["code"]["reason"]
    assert not (tmp_path / "ran").exists()
    assert "without a source" in found["no source"]["reason"]
    assert "none.safetensors" in found["gone"]["reason"]
    assert "other weights now" in found["changed"]["reason"]
    assert {row["name"]: row["reason"] for row in zoo.recommend([x], trust=True)}["code"] is None
    with pytest.raises(ValueError, match="has no model 'nobody'"):
        zoo.recommend([x], models={"nobody": model})
    with pytest.raises(TypeError, match="read again"):
        zoo.recommend(iter([x]))
