"""All pairs of many networks by their weights: one call against a loop over pairs of straightforward code."""

from __future__ import annotations

import itertools
import time

import torch
from measuring import show, timed, write
from torch import Tensor, nn

import sosie

COUNT, DEPTH, WIDTH, INPUTS, CLASSES = 200, 5, 32, 784, 10
SUBSET = 100  # pairs that the loops are timed on; their time is scaled to all pairs


def network(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [INPUTS, *[WIDTH] * (DEPTH - 1), CLASSES]
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


def maps(model: nn.Sequential) -> list[Tensor]:
    """The product of the weights up to each layer, centred over the entries of the input."""
    product: Tensor | None = None
    found = []
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().double().T
            product = weight if product is None else product @ weight
            product = product / product.norm()
            found.append(product - product.mean(0))
    return found


def by_features(a: nn.Sequential, b: nn.Sequential) -> Tensor:
    """‖W₁ᵀW₂‖² / (‖W₁ᵀW₁‖ ‖W₂ᵀW₂‖) for each pair of depths."""
    xs, ys = maps(a), maps(b)
    sizes_x, sizes_y = ([(w.T @ w).norm() for w in side] for side in (xs, ys))
    each = itertools.product(zip(xs, sizes_x, strict=True), zip(ys, sizes_y, strict=True))
    found = [(x.T @ y).square().sum() / (p * q) for (x, p), (y, q) in each]
    return torch.stack(found).reshape(len(xs), len(ys))


def by_kernels(a: nn.Sequential, b: nn.Sequential) -> Tensor:
    """tr(K₁ K₂) / √(tr(K₁ K₁) tr(K₂ K₂)) for each depth of both at once: kernels written out."""
    found = []
    for x, y in zip(maps(a), maps(b), strict=True):
        k, l = x @ x.T, y @ y.T
        found.append((k * l).sum() / ((k * k).sum() * (l * l).sum()).sqrt())
    return torch.stack(found)


def main() -> None:
    models = [network(seed) for seed in range(COUNT)]
    pairs = list(itertools.combinations(range(COUNT), 2))
    subset = pairs[:: len(pairs) // SUBSET][:SUBSET]
    found = sosie.compare_weights(models)
    together = {"one call": timed({"": lambda: sosie.compare_weights(models).matrix("wcka")}, repeats=5)[""]}
    for name, function in (("loop, every pair of depths", by_features), ("loop, same depths only", by_kernels)):
        start = time.perf_counter()
        for i, j in subset:
            function(models[i], models[j])
        together[name] = (time.perf_counter() - start) / len(subset) * len(pairs)
    i, j = subset[-1]
    apart = abs(found[i, j].matrix("wcka")[:DEPTH, :DEPTH] - by_features(models[i], models[j]).numpy()).max()
    rows = [{"way": name, "seconds": s, "times": s / together["one call"]} for name, s in together.items()]
    show(f"wcka of all {len(pairs)} pairs of {COUNT} networks of {DEPTH} layers; loops timed on {SUBSET} pairs", rows)
    print(f"largest difference: {apart:.1e}")
    write("weights", {"networks": COUNT, "layers": DEPTH, "pairs": len(pairs), "subset": SUBSET, "rows": rows})


if __name__ == "__main__":
    main()
