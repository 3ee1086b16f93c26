"""`diff` against the bare forward passes that it needs, and two folders of weights against `cat`; on a CPU.

Without replay these are two forwards of each batch, with replay three. B is A with rounding errors in its weights, so
that no number is equal. The floor is measured on a tenth of the inputs, after the pass: it has a line of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import show, timed, write
from safetensors.torch import save_file
from torch import Tensor, nn

import sosie
from sosie.models import open_model

PARTS = ("images", "text", "weights")
WIDTH, LAYERS, VOCABULARY, SEQUENCES, TOKENS = 512, 6, 8192, 128, 64  # of the language models
NOTHING = 1e-2  # a tolerance: a floor that costs nothing

CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[3])
from measuring import high_water
from sosie.diffing import diff_weights
start = time.perf_counter()
found = diff_weights(sys.argv[1], sys.argv[2])
print(json.dumps([time.perf_counter() - start, high_water(), len(found.weights), found.same]))
"""


def twin(model: nn.Module) -> nn.Module:
    """The model with other last digits."""
    other = copy.deepcopy(model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=random))
    return other.eval()


def resnet(depth: int, images: int) -> tuple[nn.Module, list[Any]]:
    model = open_model(f"resnet{depth}(seed=0)").model.eval()
    return model, list(torch.rand(images, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(128))


def decoder(kind: str, sequences: int) -> tuple[nn.Module, list[Any]]:
    transformers = __import__("transformers")
    torch.manual_seed(0)
    heads = WIDTH // 64
    if kind == "GPT-2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=heads, vocab_size=VOCABULARY)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=heads, vocab_size=VOCABULARY,
            intermediate_size=8 * WIDTH // 3,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(VOCABULARY, (sequences, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[::2, 3 * TOKENS // 4 :] = 0
    pairs = zip(ids.split(16), mask.split(16), strict=True)
    return model.eval(), [{"input_ids": some, "attention_mask": kept} for some, kept in pairs]


def study(title: str, model: nn.Module, batches: list[Any], repeats: int) -> list[dict[str, Any]]:
    a, b = model, twin(model)

    def forwards(*models: nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                for each in models:
                    each(**batch) if isinstance(batch, dict) else each(batch)

    def diffed(**options: Any) -> None:
        assert sosie.diff({"a": a, "b": b}, batches, **options).same

    seconds = timed(
        {
            "two forwards": lambda: forwards(a, b),
            "diff without replay": lambda: diffed(replay=False, floor=NOTHING),
            "three forwards": lambda: forwards(a, b, b),
            "diff": lambda: diffed(floor=NOTHING),
            "diff, with the floor": lambda: diffed(),
        },
        repeats=repeats,
    )
    of = {"diff without replay": "two forwards"}
    rows = [
        {"way": way, "seconds": spent, "of the forwards": spent / seconds[of.get(way, "three forwards")]}
        for way, spent in seconds.items()
        if "forwards" not in way
    ]
    show(title, rows)
    return [{"forwards": {way: seconds[way] for way in ("two forwards", "three forwards")}}, *rows]


# Folders of weights


def folder(path: Path, shards: int, size: int, *, changed: bool) -> None:
    """Safetensors in bfloat16 with an index; in the changed folder one tensor of four differs."""
    path.mkdir()
    side = int((size / 4 / 2) ** 0.5)
    index: dict[str, str] = {}
    for k in range(shards):
        name = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for j in range(4):
            random = torch.Generator().manual_seed(4 * k + j)
            tensors[f"layers.{k}.{j}.weight"] = torch.randn(side, side, generator=random).bfloat16()
        if changed:
            random = torch.Generator().manual_seed(k)
            tensors[f"layers.{k}.0.weight"] += 0.01 * torch.randn(side, side, generator=random).bfloat16()
        save_file(tensors, path / name)
        index |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def weights(shards: int, size: int, repeats: int) -> list[dict[str, Any]]:
    home = Path(tempfile.mkdtemp(dir=Path.home()))
    try:
        for name, changed in (("base", False), ("tuned", True)):
            folder(home / name, shards, size, changed=changed)
        sides = [home / "base", home / "tuned"]
        files = [str(file) for side in sides for file in sorted(side.glob("*.safetensors"))]
        os.sync()

        def ours() -> tuple[float, int]:
            arguments = [sys.executable, "-c", CHILD, *map(str, sides), str(Path(__file__).parent)]
            spent, most, tensors, same = json.loads(subprocess.run(arguments, stdout=-1, check=True).stdout)
            assert (tensors, same) == (4 * shards, False)
            return spent, most

        def cat() -> tuple[float, None]:
            start = time.perf_counter()
            with open("/dev/null", "wb") as nowhere:
                subprocess.run(["cat", *files], stdout=nowhere, check=True)
            return time.perf_counter() - start, None

        rows = []
        for where in ("from disk", "cached"):  # cached, cat hands the kernel's pages on and reads nothing
            found: dict[str, list[Any]] = {"cat": [], "diff": []}
            for _ in range(repeats):
                for way, run in (("cat", cat), ("diff", ours)):
                    for file in files if where == "from disk" else ():
                        with open(file, "rb") as opened:
                            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    found[way].append(run())
            read = statistics.median(seconds for seconds, _ in found["cat"])
            for way, each in found.items():
                spent = statistics.median(seconds for seconds, _ in each)
                most = max(most for _, most in each) / 1024 if way == "diff" else None
                rows.append({"way": f"{way}, {where}", "seconds": spent, "of cat": spent / read, "peak MiB": most})
    finally:
        shutil.rmtree(home)
    show(f"two folders of {shards} shards of {size / 2**20:.0f} MiB in bfloat16", rows)
    return rows


def forwards(part: str, few: int, repeats: int) -> dict[str, Any]:
    """The models of one part against their forward passes."""
    if part == "images":
        models = {
            f"a ResNet-{depth}, {count // few} images of 32 x 32, all blocks": resnet(depth, count // few)
            for depth, count in ((20, 1024), (56, 512))
        }
    else:
        size = f"{LAYERS} layers of {WIDTH}, {SEQUENCES // few} x {TOKENS} tokens, {VOCABULARY} in the vocabulary"
        models = {f"a {kind} of {size}": decoder(kind, SEQUENCES // few) for kind in ("GPT-2", "Llama")}
    return {title: study(title, model, batches, repeats) for title, (model, batches) in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one of the parts, each of which takes less than 5 minutes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a quick look at less of everything; writes nothing")
    asked = parser.parse_args()
    few = 8 if asked.small else 1
    for part in PARTS if asked.part is None else (asked.part,):
        if part == "weights":
            found = {"weights": weights(4, 2**28 // few, asked.repeats)}
        else:
            found = forwards(part, few, asked.repeats)
        if not asked.small:
            write(f"diff-{part}", {"what": __doc__, **found})


if __name__ == "__main__":
    main()
