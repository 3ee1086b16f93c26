"""How much of everything: the real run, and a smoke run. The paper leaves most of these numbers out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sosie.benchmark import SCALES, Scale
from sosie.data import CORRUPTIONS

OWN = "wcka"
RIVALS = ("normalized_bures", "linear_cka", "deconfounded_cka")  # the paper's: Procrustes as a similarity, CKA, dCKA
OTHERS = (  # which the paper did not test
    "debiased_cka",
    "deconfounded_cka(positive=False)",  # negative eigenvalues kept: dCKA can be below zero
    "kernel_alignment",  # CKA without centring, as equation 3 is printed
    "wcka_uncentred",  # as equation 5 is printed
    "wcka_lit",  # of the pixels that are lit in some training image (measures.py)
    "weight_cosine_matched",
    "mean_cca",
    "mutual_knn",
    "soft_correlation_match",
)

ATTACKS = (
    "fgsm(epsilon=0.1)",
    "fast_fgsm(epsilon=0.1)",
    "gaussian(epsilon=0.1)",
    "pgd(epsilon=0.1)",
    "trades(epsilon=0.1)",
)
PGD = "pgd(epsilon=0.1, steps=5)"  # to train against

SCRATCH = replace(
    SCALES["paper"],
    name="wcka: from scratch",
    data=("mnist",),
    strategies=("standard", "fgsm(epsilon=0.1)", PGD),
    corruptions=tuple(CORRUPTIONS),
    attacks=ATTACKS,
    numbers=(10, 30, 100, 300, 1000),
    converged=10,
    checkpoints=11,
    converged_epochs=105,
)
HEADS = replace(
    SCRATCH,
    name="wcka: heads on a frozen trunk",
    architectures=((1, 32), (1, 1024), (10, 32)),
    epochs=(5, 10, 15, 20, 25),
    strategies=("standard", PGD),
    random=0,
    converged=0,
)


@dataclass(frozen=True)
class Settings:
    """The real run."""

    device: str  # that heads are trained and networks attacked on; perceptrons are trained, and measured, on the CPU
    results: Path
    cache: Path  # networks, and how far they agree
    workers: int  # processes; 0: none but this one
    seed: int = 0
    scratch: Scale = SCRATCH
    heads: Scale = HEADS
    measures: tuple[str, ...] = (OWN, *RIVALS, *OTHERS)
    head_measures: tuple[str, ...] = (OWN, *RIVALS, "debiased_cka", "kernel_alignment", "wcka_uncentred", "mutual_knn")
    head_rows: int = 1_500  # images at most that heads are compared on: one is 1,024 wide
    trunk_epochs: int = 24
    trunk_images: int = 60_000
    trunk_batch: int = 128
    paired_rows: int = 500  # images at most for measures of pairs of rows, where networks are many; figure 1 has 1,000
    manipulated: int = 5  # converged networks


def small(full: Settings) -> Settings:
    """A smoke run: every line is run, and no number means anything."""
    scratch = replace(
        full.scratch,
        train=48,
        test=36,
        architectures=((1, 8), (2, 8)),
        seeds=2,
        epochs=(1, 2),
        strategies=("standard", "fgsm(epsilon=0.1)"),
        corruptions=("fog", "impulse_noise"),
        attacks=("fgsm(epsilon=0.1)",),
        calibrated=(2, 8),
        random=4,
        converged=2,
        checkpoints=2,
        converged_epochs=4,
        numbers=(12, 24),
        paired_rows=30,
        draws=50,
        batch=16,
        rate=3e-3,
    )
    heads = replace(
        scratch,
        name=full.heads.name,
        architectures=((1, 8), (2, 8)),
        strategies=("standard", "pgd(epsilon=0.1, steps=2)"),
        random=0,
        converged=0,
    )
    return replace(
        full,
        scratch=scratch,
        heads=heads,
        trunk_epochs=1,
        trunk_images=100,
        trunk_batch=50,
        paired_rows=20,
        head_rows=30,
        manipulated=2,
    )
