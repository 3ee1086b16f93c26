"""What compare_outputs and measures of outputs refuse, in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import LABELS, X, logits, net
from torch import nn

import sosie


def test_wrong_arguments() -> None:
    a, b = net(0), net(1)
    with pytest.raises(TypeError, match="need two models"):
        sosie.compare_outputs(a)
    with pytest.raises(TypeError, match="models needs data"):
        sosie.compare_outputs(a, b)
    with pytest.raises(TypeError, match="are one argument"):
        sosie.compare_outputs([a, b], b, X)
    with pytest.raises(ValueError, match="at least two models"):
        sosie.compare_outputs([a], X)
    with pytest.raises(TypeError, match="int is not a model"):
        sosie.compare_outputs(3, a, X)
    with pytest.raises(ValueError, match="debiased_cka: of layers"):
        sosie.compare_outputs(a, b, X, measures="debiased_cka")
    with pytest.raises(ValueError, match=r"agreement: .*use compare_outputs"):
        sosie.compare(a, b, X, measures="agreement")
    with pytest.raises(ValueError, match="no measures"):
        sosie.compare_outputs(a, b, X, measures=[])
    with pytest.raises(ValueError, match="max_rows"):
        sosie.compare_outputs(a, b, X, max_rows=0)
    with pytest.raises(ValueError, match="leave prepare_b out"):
        sosie.compare_outputs([a, b, a], X, prepare_b=lambda x: x)
    with pytest.raises(ValueError, match="one entry, got 2"):
        sosie.compare_outputs(a, {"x": LABELS, "y": LABELS}, X)


def test_labels_that_are_missing_or_wrong() -> None:
    a, b = net(0), net(1)
    with pytest.raises(ValueError, match="error_overlap: it needs labels"):
        sosie.compare_outputs(a, b, X, measures="error_overlap")
    with pytest.raises(ValueError, match=r"Sequential \(A\) and Sequential \(B\).* labels lie between .* and 3"):
        sosie.compare_outputs(a, b, [(X, LABELS + 1)])
    with pytest.raises(ValueError, match="need a label per input: 100 labels"):
        sosie.compare_outputs(a, b, X.split(50), labels=LABELS[:100])
    with pytest.raises(ValueError, match="labels has 150, the data 100"):
        sosie.compare_outputs(a, b, X[:100], labels=LABELS)
    assert sosie.compare_outputs(a, b, [(X, LABELS + 1)], measures="agreement"), "labels nobody asked for"


def test_outputs_that_cannot_be_compared() -> None:
    bad = nn.Sequential(nn.Linear(8, 3), nn.Threshold(float("inf"), float("nan")))
    with pytest.raises(ValueError, match=r"Sequential \(B\): 384 of 384 outputs are NaN"):
        sosie.compare_outputs(net(0), bad, X)
    with pytest.raises(ValueError, match="same classes on both sides, got 3 and 4"):
        sosie.compare_outputs(net(0), nn.Linear(8, 4), X)
    with pytest.raises(ValueError, match="128 inputs gave outputs of shape"):
        sosie.compare_outputs(net(0), nn.Flatten(0), X)
    with pytest.raises(ValueError, match=r"150 in one, 149 in two"):
        sosie.compare_outputs({"one": LABELS, "two": LABELS[1:]})
    with pytest.raises(ValueError, match="has 100 saved, but the data goes on to input 128"):
        sosie.compare_outputs({"one": logits(net(0))[:100]}, net(1), X)
    with pytest.raises(ValueError, match="one has 150, the data 100"):
        sosie.compare_outputs({"one": logits(net(0))}, net(1), X[:100])


def test_probabilities_of_several_labels_are_not_taken_for_logits() -> None:
    several = torch.sigmoid(logits(net(0)))
    with pytest.raises(ValueError, match=r"between 0 and 1 whose rows do not sum to 1 .*kind='logits'"):
        sosie.compare_outputs(several, several)
    assert sosie.compare_outputs(several, several, kind="logits").matrix("agreement")[0, 0] == 1
    assert sosie.compare_outputs(several, several, kind="regression").matrix("output_rmse")[0, 0] == 0


def test_empty_data_and_empty_predictions() -> None:
    for data in ([], torch.zeros(0, 8)):
        with pytest.raises(ValueError, match="no inputs"):
            sosie.compare_outputs(net(0), net(1), data)
    with pytest.raises(ValueError, match="no inputs were saved"):
        sosie.compare_outputs(LABELS[:0], LABELS[:0])
    with pytest.raises(ValueError, match="x is empty"):
        sosie.measure("agreement", LABELS[:0], LABELS[:0])


def test_a_model_that_raises_says_where() -> None:
    with pytest.raises(RuntimeError) as caught:
        sosie.compare_outputs(nn.Linear(7, 3), net(0), X)
    assert "while running Linear on inputs 60 to 63" in caught.value.__notes__


def test_files_that_are_not_predictions(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(ValueError, match="holds 2 arrays"):
        sosie.compare_outputs(tmp_path / "two.npz", LABELS)
    np.savez(tmp_path / "objects.npz", a=np.array([{}, None]))
    with pytest.raises(ValueError, match="only unpickling could read"):
        sosie.compare_outputs(tmp_path / "objects.npz", LABELS)
    with pytest.raises(FileNotFoundError):
        sosie.compare_outputs("nowhere.npz", LABELS)


def test_what_measure_refuses() -> None:
    with pytest.raises(TypeError, match="agreement takes no labels"):
        sosie.measure("agreement", LABELS, LABELS, labels=LABELS)
    with pytest.raises(TypeError, match="agreement takes no inputs"):
        sosie.measure("agreement", LABELS, LABELS, inputs=LABELS)
    with pytest.raises(TypeError, match="linear_cka compares rows"):
        sosie.measure("linear_cka", X, X, labels=LABELS)
    with pytest.raises(TypeError, match="must hold numbers"):
        sosie.measure("agreement", np.array(["cat", "dog"]), np.array(["cat", "cat"]))
    with pytest.raises(ValueError, match="same inputs, got 150 and 149"):
        sosie.measure("agreement", LABELS, LABELS[1:])
