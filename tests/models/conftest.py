"""Published weights and test images, where they are at hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def _folder(name: str, variable: str, wanted: str) -> Path:
    places = [SHARED / name, *(Path(part) for part in os.environ.get(variable, "").split(os.pathsep) if part)]
    for place in places:
        if (place / wanted).is_file():
            return place
    pytest.skip(f"no {wanted} in a folder shared/{name} beside the checkout, nor in {variable}")


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = _folder("weights", "SOSIE_WEIGHTS", "akamaster-resnet20-cifar10.safetensors")
    monkeypatch.setenv("SOSIE_WEIGHTS", str(folder))
    return folder


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = _folder("data", "SOSIE_DATA", "cifar10-test10k.npz")
    monkeypatch.setenv("SOSIE_DATA", str(folder))
    return folder


@pytest.fixture
def published(weights: Path) -> dict[str, tuple[int, float]]:
    """file: (parameters, measured accuracy in %), as the README beside the weights has it."""
    row = re.compile(r"\| (\S+\.safetensors) \| ([\d,]+) \| [\d,]+ \| [\d. ]* \| ([\d.]+) \|")
    found = row.findall((weights / "README.md").read_text("utf-8"))
    return {name: (int(count.replace(",", "")), float(measured)) for name, count, measured in found}
