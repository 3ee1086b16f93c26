"""Comparisons made by hand, as an engine would hand them over."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np

from sosie.results import Caveat, Comparison, Comparisons, Estimate, Side

HOSTILE = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    '"><svg onload="alert(1)">',
    "{{7*7}}",
    "line\u2028separator\u2029here",
    "right\u202eto left",
    "a" * 3000,
    "",
    "🧠👩‍🔬 block",
    "[red]x[/red]",
    "\x1b[31mterminal\x07",
    "half \udc80 character",
    "$x^2$ & <b>bold</b>",
]


def side(name: str, sites: list[str], width: int = 64) -> Side:
    return Side(
        name,
        tuple(sites),
        tuple(width * (1 + k // 3) for k in range(len(sites))),
        ((width, 8, 8),) * len(sites),
    )


def blocks(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Similarity as networks show it: high along the diagonal, in blocks of a stage each, falling off."""
    x, y = np.linspace(0, 1, rows)[:, None], np.linspace(0, 1, columns)[None, :]
    y = y**1.35  # B gets there later
    smooth = 0.93 * np.exp(-(((x - y) / 0.38) ** 2)) * (1 - 0.25 * np.maximum(x, y))
    stage = 0.1 * (np.floor(x * 3.99) == np.floor(y * 3.99))
    noise = np.random.default_rng(seed).normal(0, 0.012, (rows, columns))
    return np.clip(smooth + stage + noise, 0.01, 1)


def similarity(value: np.ndarray, doubt: bool = True, caveats: tuple[Caveat, ...] = (), **facts: object) -> Estimate:
    spread = 0.01 + 0.05 * (1 - value)
    given = {
        "n": 1024,
        "statistic": "U-centred Grams over blocks of 64 rows",
        "closer": "up",
        "bounds": (None, 1.0),
        "same": 1.0,
    }
    extra = {"low": value - spread, "high": np.minimum(value + spread, 1)} if doubt else {}
    return Estimate(value=value, caveats=caveats, **{**given, **extra, **facts})


def angle(value: np.ndarray, doubt: bool = True) -> Estimate:
    turned = np.arccos(np.clip(value, 0, 1))
    return similarity(
        turned,
        doubt=False,
        closer="down",
        bounds=(0.0, float(np.pi / 2)),
        same=0.0,
        statistic="Moments",
        **({"low": turned * 0.9, "high": turned * 1.05} if doubt else {}),
    )


def with_chance(values: Estimate, null: float | np.ndarray, spread: float = 0.05, search: bool = True) -> Estimate:
    """The same with what chance gives: normal round `null`, and the smallest p that 999 draws can give."""
    sign = 1.0 if values.closer == "up" else -1.0
    above = sign * (values.value - null) / spread
    p = np.vectorize(lambda z: (1 + round(999 * NormalDist().cdf(-z))) / 1000 if np.isfinite(z) else np.nan)(above)
    found = 1 - (1 - p) ** 12  # neighbouring layers are alike: fewer searches than pairs
    return replace(
        values,
        null=np.full(values.value.shape, null),
        null_spread=np.full(values.value.shape, spread),
        p=p,
        p_search=np.maximum(p, found) if search else None,
    )


PROVENANCE = {
    "data": {"name": "cifar10", "split": "test", "rows": 1024, "batch": 256},
    "models": [
        {"file": "resnet20.safetensors", "sha256": "9b1f" * 16},
        {"file": "resnet56.safetensors", "sha256": "07ce" * 16},
    ],
    "seed": 0,
    "device": "cpu",
    "precision": "float32 products, float64 sums",
    "versions": {"sosie": "0.1.0", "torch": "2.8.0", "numpy": "2.3.1"},
    "measures": ["debiased_cka", "procrustes_angle"],
    "seconds": 7.513329,
}


def pair(
    sites_a: list[str], sites_b: list[str], names: tuple[str, str] = ("resnet20", "resnet56"), **facts: object
) -> Comparison:
    value = blocks(len(sites_a), len(sites_b))
    caveats = (
        Caveat("n=1024 < width=65536: linear_cka would be biased up; this one is not"),
        Caveat("constant features: nothing to compare", site_b=sites_b[-1]),
        Caveat("n=1024 < width=16384", site_a=sites_a[0]),
        Caveat("n=1024 < width=16384", site_a=sites_a[-1]),
    )
    hole = value.copy()
    hole[:, -1] = np.nan if facts.pop("hole", False) else hole[:, -1]
    return Comparison(
        side(names[0], sites_a),
        side(names[1], sites_b),
        {
            "debiased_cka": similarity(hole, caveats=caveats, null=np.full(hole.shape, 0.03)),
            "procrustes_angle": angle(value),
            "mutual_knn": similarity(value**2, doubt=False, bounds=(0.0, 1.0)),
        },
        provenance=PROVENANCE,
    )


def doubted(sites_a: list[str], sites_b: list[str], **facts: object) -> Comparison:
    """A pair for which chance was asked: all that can be known, for two measures, and one without `same`."""
    plain = pair(sites_a, sites_b, **facts)
    values = {
        "debiased_cka": with_chance(plain["debiased_cka"], 0.02),
        "procrustes_angle": with_chance(plain["procrustes_angle"], 1.4, 0.06, search=False),
        "mutual_knn": replace(with_chance(plain["mutual_knn"], 0.01, 0.02), same=None),
    }
    return replace(plain, values=values)


def stages(count: int) -> list[str]:
    return ["conv1", *(f"layer{1 + k * 4 // max(count - 2, 1)}.{k}" for k in range(count - 2)), "fc"]


def leaves(count: int) -> list[str]:
    kinds = ("conv1", "bn1", "relu", "conv2", "bn2", "conv3", "bn3", "relu@3")
    return [f"layer{1 + k // 32}.{k // 8}.{kinds[k % 8]}" for k in range(count)]


def transformer(count: int) -> list[str]:
    return [f"encoder.layers.encoder_layer_{k // 3}.{('self_attention', 'mlp', 'ln_2')[k % 3]}" for k in range(count)]


def several(count: int = 4, sites: int = 8) -> Comparisons:
    names = tuple(f"seed-{k}" for k in range(count))
    pairs = {}
    for i in range(count):
        for j in range(i + 1, count):
            value = blocks(sites, sites, seed=10 * i + j) * (1 - 0.1 * (j - i))
            pairs[i, j] = Comparison(
                side(names[i], stages(sites)),
                side(names[j], stages(sites)),
                {"debiased_cka": similarity(value), "procrustes_angle": angle(value)},
                provenance=PROVENANCE,
            )
    return Comparisons(names, pairs)
