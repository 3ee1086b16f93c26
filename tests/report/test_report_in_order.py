"""Many measures on a narrow terminal."""

from __future__ import annotations

import io

import numpy as np
import torch
from rich.console import Console

import sosie
from sosie.models import small_cnn
from sosie.report import print_comparison


def test_no_number_is_cut_on_a_narrow_terminal() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 64)
    images = np.random.default_rng(1).random((64, 1, 28, 28)).astype("float32")
    torch.manual_seed(0)
    data = [(torch.from_numpy(images), torch.from_numpy(labels))]
    c = sosie.compare_outputs(small_cnn(), small_cnn(), data, shifts=["clean", "brightness", "fgsm(epsilon=0.1)"])
    out = io.StringIO()
    print_comparison(c, Console(file=out, width=60))
    words = out.getvalue().split()
    for name in c.measures:
        assert name.split("_")[-1] in words, name
    assert ") on A " in out.getvalue()
    assert ") on B " in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 60
    decimals = [len(w.split(".")[1]) for w in words if w.replace(".", "").isdigit() and "." in w]
    assert min(decimals) >= 3
