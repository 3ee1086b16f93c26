"""Two Llama-shaped models in bfloat16 with random weights on a GPU: `compare` and `diff` against the bare forwards.

128 sequences of 256 tokens, a quarter of them padding in every other sequence; 32 x 32 blocks. The second model is the
first with rounding errors in its weights, so that `diff` reads every number and finds the same model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from measuring import show, timed, wait, write
from torch import nn

import sosie

SIZES = {  # hidden size, layers, heads, size of the MLP, words
    "7B": (4096, 32, 32, 11008, 32000),
    "1B": (2048, 22, 32, 5632, 32000),
    "tiny": (64, 4, 4, 128, 512),
}
SEQUENCES, TOKENS = 128, 256
MEASURES = {"debiased_cka": ["debiased_cka"], "three measures": ["linear_cka", "mutual_knn", "procrustes_angle"]}
RULES = ("mean", "last", "positions")


@contextlib.contextmanager
def made_on(device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def pair(size: str, device: str) -> tuple[nn.Module, nn.Module]:
    transformers = __import__("transformers")
    hidden, layers, heads, mlp, words = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp,
        vocab_size=words, max_position_embeddings=2 * TOKENS, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with made_on(device):
        a = transformers.LlamaForCausalLM(config).eval()
    b = copy.deepcopy(a)
    random = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for parameter in b.parameters():
            noise = torch.randn(parameter.shape, generator=random, device=device, dtype=torch.bfloat16)
            parameter.mul_(1 + 2**-9 * noise)  # half a step of bfloat16, by which some of the numbers move
    return a, b


def batches(size: str, device: str, sequences: int, tokens: int, batch: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, SIZES[size][-1], (sequences, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[::2, 3 * tokens // 4 :] = 0
    pairs = zip(ids.to(device).split(batch), mask.to(device).split(batch), strict=True)
    return [{"input_ids": some, "attention_mask": kept} for some, kept in pairs]


def gib(way: Any) -> float | None:
    """GiB that a way needs beside the weights, which are there before."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def study(size: str, device: str, repeats: int, *, sequences: int, tokens: int, batch: int) -> dict[str, Any]:
    a, b = pair(size, device)
    data = batches(size, device, sequences, tokens, batch)
    models = {"a": a, "b": b}
    blocks = [f"model.layers.{k}" for k in range(SIZES[size][1])]
    verdicts: dict[str, str] = {}

    def forwards(*some: nn.Module) -> None:
        with torch.no_grad():
            for inputs in data:
                for model in some:
                    model(**inputs, use_cache=False)

    def compared(rows: str, measures: list[str]) -> None:
        sosie.compare(models, data, sites=blocks, rows=rows, measures=measures)

    def diffed(name: str, **options: Any) -> None:
        d = sosie.diff(models, data, **options)
        verdicts[name] = f"{d.verdict} KL {d.outputs[0].value:.2g}" if d.outputs else d.verdict

    ways: dict[str, Any] = {"two forwards": lambda: forwards(a, b), "three forwards": lambda: forwards(a, b, b)}
    for rows in RULES:
        for name, measures in MEASURES.items():
            if rows != "positions" or name == "debiased_cka":
                ways[f"compare, {name}, rows {rows}"] = lambda r=rows, m=measures: compared(r, m)
    ways["diff without replay"] = lambda: diffed("without replay", sites=blocks, replay=False, floor=0.5)
    ways["diff"] = lambda: diffed("with replay", sites=blocks, floor=0.5)
    ways["diff, with the floor"] = lambda: diffed("with the floor", sites=blocks)
    seconds: dict[str, float] = {}
    memory = {name: gib(way) for name, way in ways.items()}  # which warms them up, too
    seconds = timed(ways, repeats=repeats, warm=False)
    table = []
    for name, spent in seconds.items():
        forward = seconds["three forwards" if name in ("diff", "diff, with the floor") else "two forwards"]
        table.append({"way": name, "seconds": spent, "of its forwards": spent / forward, "peak GiB": memory[name]})
    show(f"two Llamas of {size} in bfloat16, {sequences} x {tokens} tokens in batches of {batch}, on {device}", table)
    print(*(f"{name}: {verdict}" for name, verdict in verdicts.items()), sep="\n")
    return {"rows": table, "verdicts": verdicts, "batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="7B,1B", help="which of 7B, 1B and tiny, separated by commas")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny pair on whatever is there: writes nothing")
    asked = parser.parse_args()
    if asked.tiny:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        study("tiny", device, 1, sequences=32, tokens=32, batch=16)
        return
    found: dict[str, Any] = {"what": __doc__}
    for size in asked.sizes.split(","):
        found[size] = study(size, "cuda", asked.repeats, sequences=SEQUENCES, tokens=TOKENS, batch=asked.batch)
        torch.cuda.empty_cache()
    write("llm-gpu", found)


if __name__ == "__main__":
    main()
