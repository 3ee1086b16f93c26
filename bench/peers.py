"""Who else has a measure: packages from PyPI, and NumPy written out; imported when they are called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import written_out
import written_out_lists

Array = np.ndarray
Peer = Callable[[Array, Array], float]
NUMPY = "NumPy, written out"


def ckatorch(x: Array, y: Array, **options: Any) -> float:
    from ckatorch.core import cka_base

    return float(cka_base(torch.from_numpy(x), torch.from_numpy(y), **options))


def pytorch_cka(x: Array, y: Array) -> float:
    from cka import cka_from_features

    return float(cka_from_features(torch.from_numpy(x), torch.from_numpy(y)))


def cca_zoo(x: Array, y: Array, power: int = 1) -> float:
    from cca_zoo.linear import CCA

    scores = CCA(min(x.shape[1], y.shape[1])).fit_transform([x, y])
    a, b = ((s - s.mean(0)) / s.std(0) for s in scores)
    return float(((a * b).mean(0) ** power).mean())


@contextmanager
def same_threads() -> Iterator[None]:
    """Importing numba changes how many threads torch uses."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def dcor(x: Array, y: Array) -> float:
    with same_threads():
        import dcor as package

        return float(package.distance_correlation(x, y))


def rsatoolbox(x: Array, y: Array, dissimilarity: str = "correlation", method: str = "spearman") -> float:
    """Its "euclidean" is squared, over the number of columns."""
    from rsatoolbox.data import Dataset
    from rsatoolbox.rdm import calc_rdm, compare

    a, b = (calc_rdm(Dataset(rows), method=dissimilarity) for rows in (x, y))
    return float(compare(a, b, method=method)[0, 0])


def scipy_procrustes(x: Array, y: Array) -> float:
    """The disparity is 1 − overlap²."""
    from scipy.spatial import procrustes

    return float(1 - procrustes(x, y)[2]) ** 0.5


def qc_procrustes(x: Array, y: Array, **options: Any) -> float:
    """Its error is the squared distance."""
    from procrustes import orthogonal

    return float(orthogonal(x, y, translate=True, **options).error) ** 0.5


def scipy_raw_procrustes(x: Array, y: Array) -> float:
    from scipy.linalg import orthogonal_procrustes

    x, y = x - x.mean(0), y - y.mean(0)
    return float((x**2).sum() + (y**2).sum() - 2 * orthogonal_procrustes(x, y)[1]) ** 0.5


def sklearn_r2(x: Array, y: Array) -> float:
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score

    return float(r2_score(y, LinearRegression().fit(x, y).predict(x), multioutput="variance_weighted"))


def sklearn_predictivity(x: Array, y: Array) -> float:
    """The same folds and penalties, chosen by leaving out one row: by folds that takes a hundred times longer."""
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import r2_score

    from sosie.measures.prediction import STRENGTHS
    from sosie.stats import dealt_folds

    fold = dealt_folds(torch.arange(len(x)), 5, 0).numpy()
    penalties = np.array(STRENGTHS) * np.sum((x - x.mean(0)) ** 2)
    scores = []
    for held in range(5):
        train, test = fold != held, fold == held
        predicted = RidgeCV(penalties).fit(x[train], y[train]).predict(x[test])
        scores.append(r2_score(y[test], predicted, multioutput="variance_weighted"))
    return float(np.mean(scores))


def pot_soft_match(x: Array, y: Array) -> float:
    import ot

    x, y = ((rows - rows.mean(0)).T for rows in (x, y))
    x, y = (side / np.sqrt((side**2).sum(1).mean()) for side in (x, y))
    return float(ot.emd2([], [], ot.dist(x, y), numItermax=10**8)) ** 0.5


def pot_bures(x: Array, y: Array) -> float:
    import ot

    zero = np.zeros(x.shape[1])
    covariances = (np.cov(rows.T, bias=True) for rows in (x, y))
    return float(np.real(ot.gaussian.bures_wasserstein_distance(zero, zero, *covariances)))


def sklearn_lists(x: Array, y: Array, of: Callable[[Array, Array], float], k: int = 10) -> float:
    from sklearn.neighbors import NearestNeighbors

    near = (NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(rows) for rows in (x, y))
    return of(*(each.kneighbors(return_distance=False) for each in near))


def numpy_lists(x: Array, y: Array, of: Callable[[Array, Array], float], k: int = 10) -> float:
    return of(*written_out.both_lists(x, y, k))


def skdim(x: Array, y: Array) -> float:
    with same_threads():
        from skdim.id import TwoNN

        a, b = (TwoNN(discard_fraction=0.1).fit(rows).dimension_ for rows in (x, y))
    return float(abs(a - b))


def sklearn_agreement(x: Array, y: Array) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(x.argmax(1), y.argmax(1)))


def sklearn_kappa(x: Array, y: Array, labels: Array) -> float:
    """Kappa of who is right and who is not."""
    from sklearn.metrics import cohen_kappa_score

    return float(cohen_kappa_score(x.argmax(1) == labels, y.argmax(1) == labels))


def sklearn_accuracies(x: Array, y: Array, labels: Array) -> float:
    from sklearn.metrics import accuracy_score

    return float(abs(accuracy_score(labels, x.argmax(1)) - accuracy_score(labels, y.argmax(1))))


def scipy_jensen_shannon(x: Array, y: Array) -> float:
    """SciPy gives the root of the divergence."""
    from scipy.spatial.distance import jensenshannon
    from scipy.special import softmax

    return float((jensenshannon(softmax(x, 1), softmax(y, 1), base=2, axis=1) ** 2).mean())


def sklearn_rmse(x: Array, y: Array) -> float:
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(x.ravel(), y.ravel()))


def from_overlap(peer: Peer, of: Callable[[float], float]) -> Peer:
    return lambda x, y: of(peer(x, y))


SQUARED_RSA = "rsa(dissimilarity='squared_euclidean', compare={!r})"
OPTIONS = (SQUARED_RSA.format("cosine"), SQUARED_RSA.format("pearson"))  # measured beside the defaults
# Code of papers that is not on PyPI is written out here from its formulas, with the libraries that it uses.
PACKAGES: dict[str, dict[str, Peer]] = {
    "linear_cka": {"ckatorch": ckatorch},
    "debiased_cka": {
        "ckatorch": partial(ckatorch, unbiased=True),
        "pytorch-cka": pytorch_cka,
        "notebook of Kornblith et al., written out": written_out.debiased_cka,
    },
    "rbf_cka": {"ckatorch": partial(ckatorch, kernel="rbf", threshold=0.5)},
    "distance_correlation": {"dcor": dcor, "ReSi, written out": written_out.distance_correlation_of_resi},
    "mean_cca": {"cca-zoo": cca_zoo},
    "cca_r2": {"cca-zoo": partial(cca_zoo, power=2)},
    "rsa": {"rsatoolbox": rsatoolbox, "SciPy, pdist": written_out.rsa_by_pdist},
    OPTIONS[0]: {"rsatoolbox": partial(rsatoolbox, dissimilarity="euclidean", method="cosine")},
    OPTIONS[1]: {"rsatoolbox": partial(rsatoolbox, dissimilarity="euclidean", method="corr")},
    "normalized_bures": {"SciPy": scipy_procrustes, "GULP, written out": written_out.normalized_bures_of_gulp},
    "procrustes_distance": {
        "SciPy": from_overlap(scipy_procrustes, lambda o: (2 - 2 * o) ** 0.5),
        "qc-procrustes": partial(qc_procrustes, scale=True),
        "sim_metric, written out": written_out.procrustes_distance_of_sim_metric,
    },
    "procrustes_angle": {"SciPy": from_overlap(scipy_procrustes, np.arccos)},
    "raw_procrustes_distance": {"SciPy": scipy_raw_procrustes, "qc-procrustes": qc_procrustes},
    "regression_r2": {"scikit-learn": sklearn_r2},
    "predictivity": {"scikit-learn": sklearn_predictivity},
    "soft_match_distance": {"POT": pot_soft_match},
    "bures_distance": {"POT": pot_bures},
    "intrinsic_dimension_difference": {"scikit-dimension": skdim},
    "agreement": {"scikit-learn": sklearn_agreement},
    "disagreement": {"scikit-learn": from_overlap(sklearn_agreement, lambda same: 1 - same)},
    "churn": {"scikit-learn": from_overlap(sklearn_agreement, lambda same: 1 - same)},
    "accuracy_difference": {"scikit-learn": sklearn_accuracies},
    "error_overlap": {"scikit-learn": sklearn_kappa},
    "jensen_shannon": {"SciPy": scipy_jensen_shannon},
    "output_rmse": {"scikit-learn": sklearn_rmse},
}
LISTS = ("mutual_knn", "jaccard", "rank_similarity", "cycle_knn", "lcs_knn")
for _name in LISTS:
    _of = getattr(written_out_lists, f"{_name}_of")
    PACKAGES[_name] = {
        "scikit-learn": partial(sklearn_lists, of=_of),
        NUMPY: partial(numpy_lists, of=_of),
    }
SAME = {"soft_match_distance": "permutation_procrustes_distance", "churn": "disagreement"}


def peers_of(name: str) -> Iterator[tuple[str, Callable[..., float]]]:
    """Name and function of everybody who has a measure; none where it is new."""
    yield from PACKAGES.get(name, {}).items()
    for module in (written_out, written_out_lists):
        if hasattr(module, SAME.get(name, name)):
            yield NUMPY, getattr(module, SAME.get(name, name))


def quietly(peer: Callable[..., float], *given: Array) -> float:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return float(peer(*given))
