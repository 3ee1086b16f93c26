"""The random state is one for all threads: models opened in several of them come out as in one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from sosie.capture import as_found
from sosie.models import open_model


def test_models_opened_in_threads_have_the_weights_of_their_seeds() -> None:
    wanted = {seed: open_model(f"small_cnn(seed={seed})").model for seed in range(4)}

    def is_right(k: int) -> bool:
        model = open_model(f"small_cnn(seed={k % 4})").model
        with as_found(model):
            model(torch.zeros(2, 1, 28, 28))
        pairs = zip(model.parameters(), wanted[k % 4].parameters(), strict=True)
        return all(torch.equal(mine, other) for mine, other in pairs)

    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(is_right, range(200)))
    assert torch.equal(torch.get_rng_state(), before)
