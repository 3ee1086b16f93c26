"""Check which axis of a site's output sosie takes as its features, in architectures of torchvision and timm.

`python bench/layouts.py after` needs torchvision and timm. It writes the column "after" of docs/layouts.json, and
docs/layouts.md from it. The true axis is known from sizes alone: inputs are chosen so that no height, width or number
of tokens equals the width of a layer, so the features are the axis whose size does. Sites with none or several such
axes are reported, but not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosie.capture import Site, watch

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "layouts.json", DOCS / "layouts.md"
INPUTS = 2
HEAD = """# Which axis holds the features

`rows="mean"`, `"positions"`, `"cls"` and `"last"` need the axis of an activation that holds its features. It is found
by following the operations of the first forward, from the layers whose weights make the features. The table checks
every module output of three or more axes whose first axis counts the inputs, in architectures with random weights.

The true axis is known from sizes: inputs are chosen so that no height, width or number of tokens equals the width of a
layer. *Unclear* counts sites where two axes or none have the width of a layer; they are not among the sites. *Right
before* is the result of an earlier version, which used the class of a module and of its neighbours. *Unknown* counts
sites where sosie makes no assumption and needs a function as row rule: heads of attention that are not joined yet, and
layers that mix tokens, with units in one axis and channels in another.

Written by `bench/layouts.py` with {versions}.

| architecture | sites | right before | right now | wrong now | unknown | unclear |
|---|---|---|---|---|---|---|"""


class ChannelsLast(nn.Module):
    """A CNN that keeps its maps as (inputs, height, width, channels) between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 40, 3)
        self.norm, self.act, self.drop = nn.LayerNorm(24), nn.GELU(), nn.Dropout()
        self.head = nn.Linear(40, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x).permute(0, 2, 3, 1)))
        x = self.drop(self.act(self.second(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        return self.head(x.mean((1, 2)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.act = nn.Embedding(50, 12), nn.Tanh()
        self.lstm, self.head = nn.LSTM(12, 20, batch_first=True, bidirectional=True), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.lstm(self.act(self.embed(x)))[0]))


class Gathering(nn.Module):
    """Nodes (inputs, nodes, features) that add up what their neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.act, self.update = nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 30)
        self.sum = _Neighbours()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.update(self.act(self.sum(self.send(x)))))


class _Neighbours(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        source, target = torch.arange(11), torch.arange(11).roll(1)
        return torch.zeros_like(x).index_add(1, target, x[:, source])


def cases() -> dict[str, tuple[Callable[[], nn.Module], Tensor, set[int]]]:
    """By name: how the model is made, an input, and numbers of tokens that are also widths of layers mixing them."""
    import timm
    import torchvision.models as tv

    def image(*size: int) -> Tensor:
        return torch.randn(INPUTS, 3, *size)

    def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: timm.create_model(name, pretrained=False, **options)

    found: dict[str, tuple[Callable[[], nn.Module], Tensor, set[int]]] = {}
    for name in ("resnet18", "densenet121", "regnet_y_400mf", "mobilenet_v3_small", "efficientnet_b0", "googlenet"):
        options = {"init_weights": False} if name == "googlenet" else {}
        found[f"torchvision {name}"] = (lambda n=name, o=options: getattr(tv, n)(**o), image(200, 232), set())
    for name in ("swin_t", "swin_v2_t", "convnext_tiny", "shufflenet_v2_x0_5", "vgg11_bn"):
        found[f"torchvision {name}"] = (lambda n=name: getattr(tv, n)(), image(200, 232), set())
    found["torchvision vit_b_32"] = (lambda: tv.vit_b_32(), image(224, 224), set())
    found["torchvision maxvit_t"] = (lambda: tv.maxvit_t(), image(224, 224), set())
    for name in (
        *("swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224", "maxvit_rmlp_pico_rw_256", "coatnet_0_rw_224"),
        *("davit_tiny", "volo_d1_224", "mvitv2_tiny", "xcit_nano_12_p16_224", "gmlp_ti16_224"),
        *("hiera_tiny_224", "cait_xxs24_224", "tiny_vit_5m_224", "beit_base_patch16_224", "sequencer2d_s"),
        *("eva02_tiny_patch14_224", "twins_svt_small", "nest_tiny", "coat_lite_tiny"),
    ):
        size = 256 if "256" in name else 224
        found[f"timm {name}"] = (of_timm(name), image(size, size), set())
    for name in (
        *("convnextv2_atto", "convnext_atto_ols", "efficientnet_b0", "mobilevit_xxs", "poolformer_s12", "pvt_v2_b0"),
        *("edgenext_small", "focalnet_tiny_srf", "fastvit_t8", "efficientvit_b0", "rdnet_tiny", "starnet_s1"),
        "mambaout_femto",
    ):
        found[f"timm {name}"] = (of_timm(name), image(352, 416), set())
    found["timm levit_128s"] = (of_timm("levit_128s"), image(224, 224), {16, 49, 196})
    found["timm mixer_b32_224"] = (of_timm("mixer_b32_224"), image(224, 224), {49})
    found["timm resmlp_12_224"] = (of_timm("resmlp_12_224"), image(224, 224), {196})
    found["channels-last CNN"] = (ChannelsLast, image(20, 22), set())
    found["bidirectional LSTM"] = (Recurrent, torch.randint(50, (INPUTS, 9)), set())
    found["graph network"] = (Gathering, torch.randn(INPUTS, 11, 6), set())
    return found


def own_width(module: nn.Module) -> int | None:
    """How many features a layer makes, by its weights."""
    match module:
        case nn.LSTM():
            return module.hidden_size * (1 + module.bidirectional)
        case nn.LayerNorm():
            return int(module.normalized_shape[-1])
    for key in ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim", "embed_dim"):
        if isinstance(getattr(module, key, None), int):
            return int(getattr(module, key))
    return None


def true_axis(module: nn.Module, shape: tuple[int, ...], widths: set[int]) -> int | None:
    """The axis that holds the features, or None where sizes do not tell."""
    own = own_width(module) if not list(module.children()) else None
    wanted = widths if own is None else {own}
    found = [axis for axis in range(1, len(shape)) if shape[axis] in wanted]
    return found[0] if len(found) == 1 else None


def survey(make: Callable[[], nn.Module], x: Tensor, mixed: set[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make().eval()
    known = {width for module in model.modules() if (width := own_width(module)) is not None}
    known |= {module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)}
    modules = dict(model.named_modules())
    shapes: dict[str, tuple[int, ...]] = {}

    def note(site: Site, activation: Tensor) -> None:
        shapes[site.label] = tuple(activation.shape)

    with torch.no_grad(), watch(model, ["*", "."], sink=note) as seen:
        model(x)
    found: dict[str, Any] = {"sites": 0, "right": 0, "wrong": [], "asked": [], "untold": []}
    for site in seen.sites:
        shape = shapes[site.label]
        if len(shape) < 3 or shape[0] != len(x):
            continue
        truth = true_axis(modules[site.module_name], shape, known - mixed)
        if shape[-1] in mixed:
            truth = None  # what mixes tokens has units in one axis and channels in another
        taken = None if site.channels_last is None else len(shape) - 1 if site.channels_last else 1
        told = f"{site.label} {type(modules[site.module_name]).__name__} {shape}"
        if truth is None:
            found["untold"].append(f"{told}: {'asked' if taken is None else f'axis {taken}'}")
            continue
        found["sites"] += 1
        if taken == truth:
            found["right"] += 1
        else:
            found["asked" if taken is None else "wrong"].append(told)
    return found


def table(found: dict[str, Any]) -> str:
    """The page, from both columns."""
    lines = [HEAD.format(versions=found["after"]["versions"])]
    before, after = (found[column]["cases"] for column in ("before", "after"))
    sums = [0] * 6
    for name, now in after.items():
        row = [now["sites"], before[name]["right"], now["right"], now["wrong"], now["asked"], now["untold"]]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        lines.append(f"| {name} | {' | '.join(map(str, row))} |")
    lines.append(f"| **all {len(after)}** | {' | '.join(map(str, sums))} |")
    return "\n".join(lines) + "\n"


def main(column: str) -> None:
    """Fill one column, "before" with the package of an older commit on the path."""
    import timm
    import torchvision

    torch.set_num_threads(1)
    counted: dict[str, dict[str, int]] = {}
    for name, case in cases().items():
        got = survey(*case)
        counted[name] = {key: part if isinstance(part, int) else len(part) for key, part in got.items()}
        print(name, counted[name], *got["wrong"][:3], *got["asked"][:3], sep="\n    ", flush=True)
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}"
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    found[column] = {"versions": versions, "cases": counted}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if found.keys() == {"before", "after"}:
        PAGE.write_text(table(found))


if __name__ == "__main__":
    main(sys.argv[1])
