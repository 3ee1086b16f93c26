"""A recorded step reads the same memory at every replay: whatever it reads from before must stay alive after it."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sosie.models import cifar_resnet
from sosie.train import Augment, Penalty, Recipe, Training, random_masks


class Reads(TorchDispatchMode):
    """Weak references to all memory that was read and not made in here; its size tells a human what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        self._made: list[Tensor] = []  # kept, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {tensor.untyped_storage()._cdata for tensor in self._made}
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in own:
                key = leaf.untyped_storage()._cdata
                self.outside.setdefault(key, (StorageWeakRef(leaf.untyped_storage()), tuple(leaf.shape)))
        found = func(*args, **(kwargs or {}))
        self._made += [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        return found

    def lost(self) -> list[tuple[int, ...]]:
        self._made.clear()
        gc.collect()
        return [shape for reference, shape in self.outside.values() if reference.expired()]


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("pairs", ["stage", "all"])
def test_nothing_it_reads_is_lost(rows: int | None, pairs: str) -> None:
    torch.manual_seed(0)
    model = cifar_resnet(8, width=0.25)
    images, labels = torch.randint(0, 256, (24, 3, 16, 16), dtype=torch.uint8), torch.arange(24) % 10
    augment = Augment(pad=2)
    draws = augment.draws(24, 0, 0)
    recipe = Recipe(epochs=1, rate=0.1, optimiser="sgd", decay=5e-4, augment=augment)
    training = Training(model, recipe.padded(images), labels, recipe, masks=random_masks(model, 0.5))
    with ExitStack() as stack:
        training.penalty = stack.enter_context(Penalty(model, rows=rows, every=1, pairs=pairs))
        stack.enter_context(training)
        for _ in range(2):
            training.step(torch.arange(12), draws[:12])
        index, some = torch.arange(12), draws[:12].clone()
        with Reads() as reads:
            training.step(index, some)
        assert len(reads.outside) > 50
        assert reads.lost() == []
