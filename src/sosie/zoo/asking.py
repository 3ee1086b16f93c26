"""The questions that a zoo answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Clusters, Duplicates, Family, Map, Neighbours, Recommendation
from .questions import find_clusters, find_duplicates, find_family, lay_out
from .questions.duplicates import SAME
from .questions.similarities import mapped_of
from .search import Views, as_query, search
from .search.indexed import build
from .settings import Settings
from .store import Store
from .store.filters import several

if TYPE_CHECKING:
    from .zoo import Entry

Filter = str | Sequence[str] | None


class Asking(ABC):
    """What `Zoo` answers, from what it has stored."""

    folder: Path
    store: Store
    settings: Settings

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def __getitem__(self, name: str) -> Entry: ...

    @property
    @abstractmethod
    def probe_path(self) -> Path:
        """The file of the inputs that all models were shown."""

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
        index: bool | None = None,
        **options: Any,
    ) -> Neighbours:
        """The `k` models, or layers, nearest to a model: one of the zoo by name, a fingerprint, or any other model.

        `by="model"`: models are sorted by the mean over the query's sites (all, or those named by `site`) of the
        largest similarity with a site of theirs; `symmetric` averages that with the same the other way round.
        `by="layer"`: for each of the query's sites the `k` nearest sites. A model of the zoo does not find itself.

        `kind`: "cka", "weights" or "atoms", as in `sosie.zoo.fingerprint`; atoms meet those of the same layer only.
        All short vectors are gone through; the best `rerank` are then sorted by the whole ones, whose cosine is
        debiased CKA (`exact`; kind "cka" only). `tag`, `architecture`, `task`: as in `list`.
        `index`: whether candidates come from the index that `index` made; None: if there is one that fits.
        `options` (sites, prepare, device) are for a model that is fingerprinted now.
        """
        filters = _filters(tag, architecture, task)
        return search(
            self, as_query(self, model, **options), k=k, kind=kind, by=by, site=site, rerank=rerank, exact=exact,
            symmetric=symmetric, filters=filters, index=index,
        )  # fmt: skip

    def index(self, kind: str = "cka", *, lists: int | None = None) -> dict[str, Any]:
        """Make an index for large zoos (faiss, `sosie[zoo]`), in a file beside the vectors; or bring it up to date.

        Searches then look at the rows in one of 32 of its `lists` (√rows of them), and at those added since. The
        numbers found are worked out from the vectors: the index says only where to look. Returned is what it covers.
        """
        mapped = mapped_of(self, kind)
        head = build(mapped, self.views.indexes.of(mapped), lists=lists)
        return {"kind": mapped.kind, "rows": head.rows, "lists": head.lists, "bytes": head.bytes}

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
        filters = _filters(tag, architecture, task)
        return lay_out(self, kind, seed, landmarks, filters)

    def clusters(
        self,
        k: int | None = None,
        kind: str = "cka",
        *,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        landmarks: int | None = None,
        seed: int = 0,
    ) -> Clusters:
        """Models in `k` groups by Ward's linkage; None: as many, of 2 to 20, as have the largest mean silhouette.

        Of more than 5,000 models, 500 `landmarks` are put into groups, half of them drawn by `seed`, half those least
        like the rest, and each other model joins the group whose landmarks it is most like on average.
        """
        filters = _filters(tag, architecture, task)
        return find_clusters(self, k, kind, seed, landmarks, filters)

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
        return find_duplicates(self, threshold, kind, _filters(tag, architecture, task))

    def family(self, model: Any, k: int = 5, **options: Any) -> Family:
        """Which base does a model come from? The `k` models most like it at layers of the same name, of every kind.

        Those recorded as its parent, children and siblings are always there, and marked.
        """
        return find_family(self, model, k, options)

    def recommend(
        self,
        data: Any,
        k: int = 5,
        models: Mapping[str, Any] | None = None,
        *,
        probe_layer: str | int | None = None,
        by: str | None = None,
        max_rows: int = 1000,
        trust: bool = False,
        tag: Filter = None,
        architecture: Filter = None,
        task: Filter = None,
        **options: Any,
    ) -> Recommendation:
        """Which model for these data? Each is run on the first `max_rows` inputs; the `k` best, and who failed.

        Models are opened again from the source that they were added with, or given as {name: model}. A source that is
        Python code is only run with `trust`. One whose weights have changed is not taken.

        Without labels: the transfer scores of `sosie.transfer`, means over layers, the smallest `mean_embedding`
        first. `probe_layer`, a layer by name or by its place (-2: the last but one): also the share of inputs that
        ridge regression from that layer, averaged over space, gives their label when they are left out; then the
        largest comes first. `by`: the score to sort by instead. `options` are of `sosie.sketch`: sites, output, device.
        """
        from .questions.recommend import How, recommend

        filters = _filters(tag, architecture, task)
        return recommend(self, data, k, models, by, trust, How(probe_layer, max_rows, options), filters)


def _filters(tag: Filter, architecture: Filter, task: Filter) -> dict[str, Any]:
    """As they go into the answer, too: a set or a generator becomes a list."""
    given = {"tag": tag, "architecture": architecture, "task": task}
    return {
        name: value if value is None or isinstance(value, str) else list(several(value, name))
        for name, value in given.items()
    }
