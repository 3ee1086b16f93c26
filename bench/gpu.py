"""Two ResNet-50s, 8 batches of 256 images at 224 x 224, random weights: debiased CKA on a GPU.

torchvision's ResNet-50 has 126 leaf modules that fire 158 times; peers keep one call of each, so the first
calls are compared there, and all 158 in a line of its own. TF32 is allowed for everybody.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import show, timed, wait, write
from torch import Tensor, nn
from torch.utils.data import DataLoader
from truth import activations, leaves, song

import sosie

BATCHES, BATCH, BLOCK = 8, 256, 64


def blocks(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Bottleneck"]


def peak(way: Callable[[], object]) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def reference(a: nn.Module, b: nn.Module, names: list[str], batches: list[Tensor], add: float) -> Tensor:
    """The same estimate (sums over blocks of 64 rows) in float64 on float32 activations, the plain way."""
    sums = [0.0, 0.0, 0.0]
    for x in batches:
        stacks = []
        for model in (a, b):
            sites = [rows[0] for rows in activations(model, names, [x], add=add)]
            stacks.append([torch.stack([_gram(r[s : s + BLOCK]) for r in sites]) for s in range(0, len(x), BLOCK)])
            del sites
        for k, l in zip(*stacks, strict=True):
            for part, (one, two) in enumerate(((k, l), (k, k), (l, l))):
                sums[part] = sums[part] + song(one, two)
    own = torch.outer(torch.diagonal(sums[1]), torch.diagonal(sums[2]))
    return (sums[0] / own.sqrt()).cpu()


def _gram(rows: Tensor) -> Tensor:
    """In float64, about the block's mean: U-centring does not see the difference, rounding does."""
    rows = rows.double()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def study(
    a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str], calls: list[str], repeats: int
) -> list[dict]:
    results: dict[str, Tensor] = {}
    order: list[str] = []

    @torch.no_grad()
    def forward() -> None:
        for x in batches:
            a(x)
            b(x)

    def ours() -> None:
        c = sosie.compare(a, b, batches, sites_a=calls, sites_b=calls)
        results["sosie"] = torch.from_numpy(c.matrix())
        order[:] = [site.partition("@")[0] for site in c.sites_a]

    def shifted() -> None:
        c = sosie.compare(a, b, batches, sites_a=calls, sites_b=calls, rows=plus_100)
        results["sosie, 100 added to every feature"] = torch.from_numpy(c.matrix())

    def full() -> None:
        c = sosie.compare(a, b, batches, sites_a=calls, sites_b=calls, precision="float32")
        results["sosie, float32 products"] = torch.from_numpy(c.matrix())

    def peer() -> None:
        from cka import compute_cka

        loader = DataLoader(batches, batch_size=None)  # a plain list would be taken for several loaders
        found = compute_cka(a, b, loader, layers=names, model2_layers=names, device="cuda", progress=False)
        results["pytorch-cka 1.1.3"] = found[0].double().cpu()

    ways = {"forward passes": forward, "sosie": ours, "sosie, float32 products": full}
    ways["sosie, 100 added to every feature"] = shifted
    try:
        import cka  # noqa: F401

        ways["pytorch-cka 1.1.3"] = peer
    except ImportError:
        print("pytorch-cka is not installed: left out")
    memory = {name: peak(way) for name, way in ways.items()}
    seconds = timed(ways, repeats=repeats, warm=False)
    plain, moved = (reference(a, b, names, batches, add) for add in (0.0, 100.0))
    place = [names.index(name) for name in order]  # sosie's sites are in execution order, names in that of the modules
    rows = []
    for name in ways:
        truth = moved if "100" in name else plain
        if name.startswith("sosie"):
            truth = truth[place][:, place]
        error = float((results[name] - truth).abs().max()) if name in results else None
        rows.append(
            {
                "way": name,
                "seconds": seconds[name],
                "of the forward passes": seconds[name] / seconds["forward passes"],
                "peak GiB": memory[name],
                "largest error": error,
            }
        )
    return rows


def by_batches(a: nn.Module, b: nn.Module, batches: list[Tensor], calls: list[str], repeats: int) -> dict[str, float]:
    """What a comparison costs once, and for each batch: the slope and the intercept of 4 and 16 batches."""
    few, many = batches[:4], batches * 2

    @torch.no_grad()
    def forward(some: list[Tensor]) -> None:
        for x in some:
            a(x)
            b(x)

    def ours(some: list[Tensor]) -> None:
        sosie.compare(a, b, some, sites_a=calls, sites_b=calls)

    seconds = timed(
        {"forward 4": lambda: forward(few), "forward 16": lambda: forward(many),
         "sosie 4": lambda: ours(few), "sosie 16": lambda: ours(many)},
        repeats=repeats,
    )  # fmt: skip
    slope = {who: (seconds[f"{who} 16"] - seconds[f"{who} 4"]) / 12 for who in ("forward", "sosie")}
    return {
        "each batch, of its forward passes": slope["sosie"] / slope["forward"],
        "once, seconds": seconds["sosie 4"] - 4 * slope["sosie"],
    }


def plus_100(activation: Tensor) -> Tensor:
    return activation.flatten(1) + 100


def main() -> None:
    from torchvision.models import resnet50

    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(resnet50(weights=None).cuda().eval())
    a, b = models
    random = torch.Generator(device="cuda").manual_seed(0)
    batches = [torch.randn(BATCH, 3, 224, 224, device="cuda", generator=random) for _ in range(BATCHES)]
    found = {"what": __doc__}
    for title, names in (("16 x 16 block outputs", blocks(a)), ("126 x 126 leaf modules", leaves(a))):
        found[title] = study(a, b, batches, names, [f"{name}@1" for name in names], repeats)
        show(title, found[title])
        found[f"{title}, by batches"] = by_batches(a, b, batches, [f"{name}@1" for name in names], repeats)
        print(found[f"{title}, by batches"])
    every = timed(
        {"all calls": lambda: sosie.compare(a, b, batches, sites_a="leaves", sites_b="leaves")}, repeats=repeats
    )
    whole = found["126 x 126 leaf modules"][0]["seconds"]
    found["158 x 158 calls"] = {"seconds": every["all calls"], "of the forward passes": every["all calls"] / whole}
    print("all 158 calls:", found["158 x 158 calls"])
    write("gpu", found)


if __name__ == "__main__":
    main()
