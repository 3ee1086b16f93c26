"""Measures of neighbours, geometry and outputs as a competent user writes them with NumPy, SciPy and scikit-learn."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.neighbors import kneighbors_graph
from written_out import both_lists, centred, units

Array = np.ndarray
K = 10


def _matches(near_x: Array, near_y: Array) -> Array:
    return near_x[:, :, None] == near_y[:, None, :]


def mutual_knn_of(near_x: Array, near_y: Array) -> float:
    return float(_matches(near_x, near_y).sum((1, 2)).mean() / near_x.shape[1])


def jaccard_of(near_x: Array, near_y: Array) -> float:
    common = _matches(near_x, near_y).sum((1, 2))
    return float((common / (2 * near_x.shape[1] - common)).mean())


def rank_similarity_of(near_x: Array, near_y: Array) -> float:
    rank = np.arange(1, near_x.shape[1] + 1)
    matches = _matches(near_x, near_y)
    weights = 2 / ((1 + np.abs(rank[:, None] - rank)) * (rank[:, None] + rank))
    most = np.concatenate([[1.0], np.cumsum(1 / rank)])
    return float(((matches * weights).sum((1, 2)) / most[matches.sum((1, 2))]).mean())


def cycle_knn_of(near_x: Array, near_y: Array) -> float:
    return float((near_x[near_y] == np.arange(len(near_x))[:, None, None]).any((1, 2)).mean())


def lcs_knn_of(near_x: Array, near_y: Array) -> float:
    matches, k = _matches(near_x, near_y), near_x.shape[1]
    longest = np.zeros((k + 1, k + 1, len(near_x)), dtype=int)
    for a in range(k):
        for b in range(k):
            longest[a + 1, b + 1] = np.maximum(
                np.maximum(longest[a, b + 1], longest[a + 1, b]), longest[a, b] + matches[:, a, b]
            )
    return float(longest[k, k].mean() / k)


def second_order_cosine(x: Array, y: Array) -> float:
    near_x, near_y = both_lists(x, y, K)
    cosines_x, cosines_y = (units(rows) @ units(rows).T for rows in (x, y))
    member = np.zeros(cosines_x.shape, dtype=bool)
    np.put_along_axis(member, near_x, True, 1)
    np.put_along_axis(member, near_y, True, 1)
    a, b = cosines_x * member, cosines_y * member
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).mean())


def magnitude_difference(x: Array, y: Array) -> float:
    return float(abs(np.linalg.norm(x.mean(0)) - np.linalg.norm(y.mean(0))))


def concentricity_difference(x: Array, y: Array) -> float:
    a, b = ((units(rows) @ rows.mean(0)).mean() / np.linalg.norm(rows.mean(0)) for rows in (x, y))
    return float(abs(a - b))


def uniformity_difference(x: Array, y: Array) -> float:
    def uniformity(rows: Array) -> float:
        cosines = (units(rows) @ units(rows).T)[np.triu_indices(len(rows), 1)]
        return float(np.log(np.exp(4 * cosines - 4).mean()))

    return abs(uniformity(x) - uniformity(y))


def imd(x: Array, y: Array) -> float:
    temperatures = np.logspace(-1, 1, 256)

    def trace(rows: Array) -> Array:
        graph = kneighbors_graph(rows, 5).toarray()
        graph = np.maximum(graph, graph.T)
        root = graph.sum(1) ** -0.5
        values = 1 - np.linalg.eigvalsh(root[:, None] * graph * root)
        return np.exp(-temperatures[:, None] * values).mean(1)

    return float((np.exp(-2 * (temperatures + 1 / temperatures)) * np.abs(trace(x) - trace(y))).max())


def rtd(x: Array, y: Array, rows: int = 400) -> float:
    """By ripser, on the rows that sosie's default seed draws."""
    import torch
    from ripser import ripser

    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:rows].sort().values.numpy()

    def distances(side: Array) -> Array:
        found = cdist(side[drawn], side[drawn])
        return found / np.quantile(found, 0.9)

    def bars(a: Array, b: Array) -> float:
        graph = np.block([[np.zeros_like(a), a], [a, np.minimum(a, b)]])
        born, died = ripser(graph, maxdim=1, distance_matrix=True)["dgms"][1].T
        return float((died - born).sum())

    a, b = distances(x), distances(y)
    return (bars(a, b) + bars(b, a)) / 2


# Outputs: logits (n, classes), and labels (n,)


def agreement(x: Array, y: Array) -> float:
    return float((x.argmax(1) == y.argmax(1)).mean())


def disagreement(x: Array, y: Array) -> float:
    return float((x.argmax(1) != y.argmax(1)).mean())


def _right(x: Array, y: Array, labels: Array) -> tuple[Array, Array]:
    return x.argmax(1) == labels, y.argmax(1) == labels


def bad_churn(x: Array, y: Array, labels: Array) -> float:
    a, b = _right(x, y, labels)
    return float((a & ~b).mean())


def accuracy_difference(x: Array, y: Array, labels: Array) -> float:
    a, b = _right(x, y, labels)
    return float(abs(a.mean() - b.mean()))


def min_max_normalised_disagreement(x: Array, y: Array, labels: Array) -> float:
    a, b = _right(x, y, labels)
    wrong_a, wrong_b = 1 - a.mean(), 1 - b.mean()
    least, most = abs(wrong_a - wrong_b), min(wrong_a + wrong_b, 1)
    return float((disagreement(x, y) - least) / (most - least))


def error_overlap(x: Array, y: Array, labels: Array) -> float:
    a, b = _right(x, y, labels)
    expected = a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean())
    return float(((a == b).mean() - expected) / (1 - expected))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def jensen_shannon(x: Array, y: Array) -> float:
    p, q = _softmax(x), _softmax(y)
    m = (p + q) / 2
    return float(((p * np.log2(p / m)).sum(1) + (q * np.log2(q / m)).sum(1)).mean() / 2)


def output_rmse(x: Array, y: Array) -> float:
    return float(np.sqrt(((x - y) ** 2).mean()))


def output_correlation(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    return float(np.mean((x * y).sum(0) / (np.linalg.norm(x, axis=0) * np.linalg.norm(y, axis=0))))
