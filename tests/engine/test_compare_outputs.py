"""compare_outputs as a user meets it: models or predictions in, a Comparison out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifiers import LABELS, X, logits, net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.engine.uncertainty import of_share
from sosie.results import Comparison, Comparisons


def values(found: Comparison) -> dict[str, float]:
    return {name: found.matrix(name).item() for name in found.measures}


def test_values_are_those_of_the_outputs() -> None:
    a, b = net(0), net(1)
    found = sosie.compare_outputs(a, b, TensorDataset(X, LABELS))
    assert found.sites_a == found.sites_b == ["output"]
    assert found.measures == [
        "agreement", "disagreement", "bad_churn", "min_max_normalised_disagreement", "accuracy_difference",
        "error_overlap", "jensen_shannon",
    ]  # fmt: skip
    for name in found.measures:
        needs = {} if name in ("agreement", "disagreement", "jensen_shannon") else {"labels": LABELS}
        assert found.matrix(name).item() == pytest.approx(sosie.measure(name, logits(a), logits(b), **needs), abs=1e-6)
    right = [(logits(model).argmax(1) == LABELS).double().mean().item() for model in (a, b)]
    assert found.provenance["accuracy"] == pytest.approx(right)
    assert found.provenance["inputs"] == 150
    named = sosie.compare_outputs(a, b, TensorDataset(X, LABELS), measures=["churn"])  # disagreement by another name
    assert np.array_equal(named.matrix("churn"), found.matrix("disagreement"))


def test_rows_have_interval_and_chance() -> None:
    row = next(r for r in sosie.compare_outputs(net(0), net(1), [(X, LABELS)]).rows() if r["measure"] == "agreement")
    assert row["low"] < row["value"] < row["high"]
    a, b = (np.bincount(logits(net(k)).argmax(1).numpy(), minlength=3) for k in (0, 1))
    assert row["null"] == pytest.approx((a * b).sum() / 150**2)
    assert 0 < row["null_spread"] < 0.1
    assert row["n"] == 150


def test_the_batch_size_does_not_matter() -> None:
    a, b = net(0).double(), net(1).double()
    found = [
        sosie.compare_outputs(a, b, DataLoader(TensorDataset(X.double(), LABELS), size)).rows() for size in (1, 37, 150)
    ]
    for one, other in zip(found[0] * 2, found[1] + found[2], strict=True):
        for key in ("value", "low", "high", "null", "null_spread", "p"):
            assert one[key] == (None if other[key] is None else pytest.approx(other[key], abs=1e-9))


def test_all_pairs_in_one_pass() -> None:
    class Counted(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net, self.calls = net(seed), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    models = [Counted(k) for k in range(3)]
    found = sosie.compare_outputs([*models, models[0]], X.split(50), measures="agreement")
    assert isinstance(found, Comparisons)
    assert [model.calls for model in models] == [3, 3, 3], "a model is run once a batch, however often it is compared"
    assert len(found) == 6
    assert found[0, 3].matrix().item() == 1
    alone = sosie.compare_outputs(models[0], models[2], X, measures="agreement")
    assert found[0, 2].matrix().item() == alone.matrix().item()


def test_predictions_in_place_of_models(tmp_path: Path) -> None:
    a, b = (logits(net(k)) for k in (0, 1))
    models = values(sosie.compare_outputs(net(0), net(1), [(X, LABELS)]))
    assert values(sosie.compare_outputs(a, b.numpy(), labels=LABELS)) == pytest.approx(models, abs=1e-6)
    assert values(sosie.compare_outputs(a, net(1), [(X, LABELS)])) == pytest.approx(models, abs=1e-6)
    named = sosie.compare_outputs({"one": a}, {"two": b}, labels=LABELS.numpy())
    assert (named.side_a.name, named.side_b.name) == ("one", "two")
    three = sosie.compare_outputs({"one": a, "two": b, "three": LABELS}, measures=["agreement"])
    assert three.names == ("one", "two", "three")
    right = (b.argmax(1) == LABELS).double().mean().item()
    assert three["two", "three"].matrix().item() == pytest.approx(right)
    np.savez(tmp_path / "first.npz", a.argmax(1).numpy())
    np.savez(tmp_path / "second.npz", b.numpy())
    files = sosie.compare_outputs(tmp_path / "first.npz", str(tmp_path / "second.npz"))
    assert files.side_a.name == "first"
    assert values(files)["agreement"] == pytest.approx(models["agreement"])


def test_regression() -> None:
    class Number(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = net(seed)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[:, 0]

    found = sosie.compare_outputs(Number(0), Number(1), X.split(40))
    assert found.measures == ["output_rmse", "output_correlation"]
    x, y = logits(Number(0)).double(), logits(Number(1)).double()
    assert found.matrix("output_rmse").item() == pytest.approx((x - y).square().mean().sqrt().item(), abs=1e-6)
    assert found.matrix("output_correlation").item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    with pytest.raises(ValueError, match="agreement: it compares classes, and these outputs are numbers"):
        sosie.compare_outputs(Number(0), Number(1), X, measures="agreement")


class Wrapped(nn.Module):
    """Returns logits in some structure, as classifiers of other libraries do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = net(0), how

    def forward(self, x: Tensor) -> Any:
        found = self.net(x)
        if self.how == "tuple":
            return found, x
        if self.how == "dict":
            return {"last_hidden_state": x, "logits": found}
        return type("Output", (dict,), {})(hidden_states=(x,), logits=found)


@pytest.mark.parametrize("how", ["tuple", "dict", "output"])
def test_outputs_of_any_structure(how: str) -> None:
    found = sosie.compare_outputs(Wrapped(how), net(0), X, measures="jensen_shannon")
    assert found.matrix().item() == pytest.approx(0, abs=1e-12)
    dicts = [{"x": X, "labels": LABELS}]
    right = sosie.compare_outputs(Wrapped(how), net(1), dicts, inputs=lambda batch: batch["x"]).provenance["accuracy"]
    assert right[0] == pytest.approx((logits(net(0)).argmax(1) == LABELS).double().mean().item())


def test_each_model_has_its_own_normalisation() -> None:
    found = sosie.compare_outputs(net(0), net(0), X, prepare_a=lambda x: x.mul_(2), prepare_b=lambda x: x + 1)
    direct = sosie.measure("jensen_shannon", logits(net(0), 2 * X), logits(net(0), X + 1))
    assert found.matrix("jensen_shannon").item() == pytest.approx(direct, abs=1e-6)


def test_models_and_random_state_are_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    other, before = net(0), {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    sosie.compare_outputs(model, other, DataLoader(TensorDataset(X, LABELS), 50, shuffle=True))
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_door_with_specifications() -> None:
    found = sosie.compare_outputs("small_cnn(seed=0)", "small_cnn(seed=1)", "demo", max_rows=64)
    assert found["agreement"].n == 64
    assert "error_overlap" in found.measures
    assert found.provenance["data"] == "demo"


def test_labels_from_elsewhere() -> None:
    a, b = net(0), net(1)
    truth = values(sosie.compare_outputs(a, b, [(X, LABELS)]))
    assert values(sosie.compare_outputs(a, b, X.split(40), labels=LABELS)) == pytest.approx(truth, abs=1e-6)
    hidden = [{"x": X, "extra": LABELS}]
    found = sosie.compare_outputs(a, b, hidden, labels=lambda d: d["extra"], inputs=lambda d: d["x"])
    assert values(found) == pytest.approx(truth, abs=1e-6)
    assert "error_overlap" not in sosie.compare_outputs(a, b, [(X, LABELS)], labels=lambda batch: None).measures
    assert "error_overlap" not in sosie.compare_outputs(a, b, [(X, LABELS.float())]).measures, "those are no classes"


def test_saved_and_shown_like_any_comparison(tmp_path: Path) -> None:
    found = sosie.compare_outputs(net(0), net(1), [(X, LABELS)])
    found.save(tmp_path / "o.json")
    again = sosie.load(tmp_path / "o.json")
    assert again.rows() == found.rows()
    assert "error_overlap" in sosie.write_report(again, tmp_path / "o.html").read_text("utf-8")


def test_answers_that_never_differ_are_no_proof() -> None:
    same = torch.arange(20) % 4
    found = {row["measure"]: row for row in sosie.compare_outputs(same, same, labels=same).rows()}
    assert (found["agreement"]["low"], found["agreement"]["high"]) == pytest.approx((0.025 ** (1 / 20), 1))
    assert (found["bad_churn"]["low"], found["bad_churn"]["high"]) == pytest.approx((0, 1 - 0.025 ** (1 / 20)))
    assert found["accuracy_difference"]["low"] is None


@pytest.mark.parametrize("n", [5, 20, 128])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.98])
def test_the_interval_of_a_share_holds_it(n: int, share: float) -> None:
    """The coverage is a sum over all counts, so it is exact."""
    counts = range(n + 1)
    chance = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in counts]
    held = sum(
        p for k, p in zip(counts, chance, strict=True) if of_share(k / n, n)[0] <= share <= of_share(k / n, n)[1]
    )
    assert held >= 0.95


def test_a_value_that_is_undefined_says_why() -> None:
    found = sosie.compare_outputs(LABELS, (LABELS + 1) % 3, labels=LABELS)
    row = next(r for r in found.rows() if r["measure"] == "min_max_normalised_disagreement")
    assert np.isnan(row["value"])
    assert row["caveats"] == [
        "undefined: the error rates allow only one disagreement, as when one model makes no errors"
    ]
    both = sosie.compare_outputs(LABELS, LABELS, labels=LABELS, measures="error_overlap").rows()[0]
    assert "right about every input" in both["caveats"][0]
    with pytest.raises(ValueError, match="error_overlap: a model is right about every input"):
        sosie.measure("error_overlap", LABELS, (LABELS + 1) % 3 * (LABELS > 0), labels=LABELS)
    with pytest.raises(ValueError, match="output_correlation: an output of one model is the same"):
        sosie.measure("output_correlation", np.full(5, 0.5), np.arange(5) / 3)


def test_ties_are_said() -> None:
    tied = torch.tensor([[1.0, 1.0, 0.0]] * 5 + [[0.0, 2.0, 1.0]] * 15)
    row = sosie.compare_outputs(tied, tied.argmax(1), measures="agreement").rows()[0]
    assert row["caveats"] == ["5 of 20 outputs of A have several largest entries: the first counts"]


def test_a_model_that_always_answers_the_same_is_named() -> None:
    answers = torch.arange(40) % 3
    same = sosie.compare_outputs({"constant": torch.ones(40, dtype=torch.long)}, {"other": answers})
    assert [text for row in same.rows() for text in row["caveats"] if "predicts class" in text] == [
        "A predicts class 1 for all 40 inputs"
    ] * len(same.rows())
    assert not any(row["caveats"] for row in sosie.compare_outputs({"a": answers}, {"b": answers.flip(0)}).rows())
