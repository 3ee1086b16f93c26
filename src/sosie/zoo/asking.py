"""The questions that a zoo answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Clusters, Duplicates, Family, Map, Neighbours
from .questions import clusters, duplicates, family, lay_out
from .questions.duplicates import SAME
from .search import Views, as_query, search
from .settings import Settings
from .store import Store

if TYPE_CHECKING:
    from .zoo import Entry

Filter = str | Sequence[str] | None


class Asking:
    """What `Zoo` answers, from what it has stored."""

    folder: Path
    store: Store
    settings: Settings

    def __contains__(self, name: object) -> bool:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Entry:
        raise NotImplementedError

    @property
    def probe_path(self) -> Path:
        raise NotImplementedError

    @cached_property
    def views(self) -> Views:
        """Where the vectors are."""
        return Views(self.store)

    def search(
        self,
        model: Any,
        k: int = 10,
        kind: str = "cka",
        by: str = "model",
        *,
        site: str | Sequence[str] | None = None,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        rerank: int = 50,
        exact: bool = True,
        symmetric: bool = False,
        **options: Any,
    ) -> Neighbours:
        """The `k` models, or layers, nearest to a model: one of the zoo by name, a fingerprint, or any other model.

        `by="model"`: models are sorted by the mean over the query's sites (all, or those named by `site`) of the
        largest similarity with a site of theirs; `symmetric` averages that with the same the other way round.
        `by="layer"`: for each of the query's sites the `k` nearest sites. A model of the zoo does not find itself.

        `kind`: "cka", "weights" or "atoms", as in `sosie.zoo.fingerprint`; atoms meet those of the same layer only.
        All short vectors are gone through; the best `rerank` are then sorted by the whole ones, whose cosine is
        debiased CKA (`exact`; kind "cka" only). `tag`, `architecture`, `task`: as in `list`.
        `options` (sites, prepare, device) are for a model that is fingerprinted now.
        """
        filters = {"tag": tag, "architecture": architecture, "task": task}
        return search(
            self, as_query(self, model, **options), k=k, kind=kind, by=by, site=site, rerank=rerank, exact=exact,
            symmetric=symmetric, filters=filters,
        )  # fmt: skip

    def similar_layers(
        self, model: Any, site: str | Sequence[str] | None = None, k: int = 10, **how: Any
    ) -> Neighbours:
        """The `k` layers of other models nearest to a layer of a model: `search` with by="layer"."""
        return self.search(model, k, by="layer", site=site, **how)

    def map(
        self,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        landmarks: int | None = None,
        seed: int = 0,
    ) -> Map:
        """Models as points in the plane: classical multidimensional scaling of distances √(2 − 2 similarity).

        The similarity of two models is that of `search(symmetric=True)`, from the short vectors. Of more than 2,000
        models, all are laid out around 500 `landmarks` drawn by `seed` (de Silva and Tenenbaum 2004). How far the
        plane is from the distances is its `stress`, over all pairs, or over those of models and landmarks.
        """
        filters = {"tag": tag, "architecture": architecture, "task": task}
        return lay_out(self, kind, seed, landmarks, filters)

    def clusters(
        self,
        k: int | None = None,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
    ) -> Clusters:
        """Models in `k` groups by average linkage; None: as many, of 2 to 20, as have the largest mean silhouette."""
        return clusters(self, k, kind, {"tag": tag, "architecture": architecture, "task": task})

    def duplicates(
        self,
        threshold: float = SAME,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
    ) -> Duplicates:
        """Models with the weights of one added before, or alike at every site: similarity of `threshold` or more.

        By the whole vectors where there are any. CKA does not see rotations and scales, so that a network with its
        neurons in another order is a duplicate. A lower threshold, as .99, finds those that were hardly trained on.
        """
        return duplicates(self, threshold, kind, {"tag": tag, "architecture": architecture, "task": task})

    def family(self, model: Any, k: int = 5, **options: Any) -> Family:
        """Which base does a model come from? The `k` models most like it at layers of the same name, of every kind.

        Those recorded as its parent, children and siblings are always there, and marked.
        """
        return family(self, model, k, options)
