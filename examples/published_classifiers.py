"""Which of 30 published CIFAR-10 classifiers err alike, and do they err like people?

Predictions on the 10,000 test images are those that Recht et al. 2018 published with CIFAR-10.1; the people are the
50 or so judges an image of CIFAR-10H (Peterson et al. 2019). Needs cifar10-test-predictions.npz in SOSIE_DATA.

    SOSIE_DATA=path/to/data python examples/published_classifiers.py

What it finds (error overlap is Cohen's kappa of right and wrong; 0 is chance, give or take 0.009):

- Any two of the classifiers err alike: overlap 0.16 to 0.74, mean 0.41 over 435 pairs. They are wrong together about
  2.9 % of the images, where independent errors would give 0.5 %, and then name the same wrong class 7 times in 10.
- Kin err most alike (random features 0.74, two Shake-Shake nets 0.66, two ResNeXts 0.66), and AlexNet or random
  features against the best nets least (0.16 to 0.17). Agreement alone does not show it: the random features that err
  most alike agree on 90 % of the images, less than the average pair (91 %).
- With one judge the overlap is 0.13 on average, 0.18 at most: above chance, and a third of what classifiers have
  with each other. Two judges have 0.19 with each other. The more accurate a classifier, the more its errors are
  those of people (correlation 0.82 over 30 classifiers).
"""

from __future__ import annotations

import numpy as np

import sosie
from sosie.factory import find_file
from sosie.results import Comparison

SHOWN = 5
SEED = 0


def one_judge(counts: np.ndarray, seed: int) -> np.ndarray:
    """The answer of one judge an image, drawn from those who saw it."""
    drawn = np.random.default_rng(seed).random((len(counts), 1)) * counts.sum(1, keepdims=True)
    return (drawn >= counts.cumsum(1)).sum(1)


def wrong_together(pair: Comparison) -> tuple[float, float]:
    """The share of images that both get wrong, and what it would be if errors were independent."""
    right_a, right_b = pair.provenance["accuracy"]
    return 1 - right_b - pair.matrix("bad_churn").item(), (1 - right_a) * (1 - right_b)


def same_mistake(pair: Comparison) -> float:
    """Where both are wrong, how often they name the same wrong class."""
    both_right = pair.provenance["accuracy"][0] - pair.matrix("bad_churn").item()
    return (pair.matrix("agreement").item() - both_right) / wrong_together(pair)[0]


def show(title: str, pairs: list[Comparison]) -> None:
    print(f"\n{title}\n  error overlap     95 % interval  agreement  same mistake")
    for pair in pairs:
        row = next(r for r in pair.rows() if r["measure"] == "error_overlap")
        print(
            f"  {row['value']:13.3f}   {row['low']:.3f} to {row['high']:.3f}  {pair.matrix('agreement').item():9.3f}"
            f"  {same_mistake(pair):12.3f}   {pair.side_a.name} and {pair.side_b.name}"
        )


def main() -> None:
    with np.load(find_file("cifar10-test-predictions.npz", "SOSIE_DATA"), allow_pickle=False) as stored:
        labels, counts = stored["labels"], stored["human_counts"].astype(np.int64)
        models = dict(zip(stored["model_names"].tolist(), stored["predictions"], strict=True))
    first = one_judge(counts, SEED)
    another = one_judge(counts - np.eye(counts.shape[1], dtype=np.int64)[first], SEED + 1)  # not the same one again
    people = {"one judge": first, "another judge": another, "majority of judges": counts.argmax(1)}

    found = sosie.compare_outputs({**models, **people}, labels=labels)
    among = [pair for pair in found if pair.side_a.name in models and pair.side_b.name in models]
    by_overlap = sorted(among, key=lambda pair: -pair.matrix("error_overlap").item())
    overlap = np.array([pair.matrix("error_overlap").item() for pair in among])
    chance = np.array([pair["error_overlap"].null_spread.item() for pair in among])
    expected = np.array([pair["agreement"].null.item() for pair in among])
    agreement = np.array([pair.matrix("agreement").item() for pair in among])
    print(f"{len(models)} classifiers, {len(among)} pairs, {len(labels):,} images")
    for name, values, by_chance in (
        ("agreement", agreement, f"{expected.mean():.3f}"),
        ("error overlap", overlap, f"0 (sd {chance.mean():.3f})"),
    ):
        print(f"{name} {values.min():.3f} to {values.max():.3f}, mean {values.mean():.3f}; chance {by_chance}")
    together = np.array([wrong_together(pair) for pair in among]).mean(0)
    print(f"both wrong about {together[0]:.1%} of the images, {together[1]:.1%} if errors were independent")
    print(f"same mistake where both err: mean {np.mean([same_mistake(pair) for pair in among]):.3f}")
    show("The pairs that err most alike", by_overlap[:SHOWN])
    show("The pairs that err least alike", by_overlap[-SHOWN:])
    for person in people:
        with_person = [p for p in found if p.side_a.name in models and p.side_b.name == person]
        with_person.sort(key=lambda pair: -pair.matrix("error_overlap").item())
        values = [pair.matrix("error_overlap").item() for pair in with_person]
        accuracy = with_person[0].provenance["accuracy"][1]
        title = f"Classifiers and {person} (accuracy {accuracy:.3f}): mean {np.mean(values):.3f}; the nearest"
        show(title, with_person[:3])
        slope = np.corrcoef([pair.provenance["accuracy"][0] for pair in with_person], values)[0, 1]
        print(f"  correlation of a classifier's accuracy with its overlap: {slope:+.2f}")
    show("People among themselves", [p for p in found if p.side_a.name in people and p.side_b.name in people])


if __name__ == "__main__":
    main()
