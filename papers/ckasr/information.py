"""TEMPORARY, until sosie has them."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_information(x: Tensor, y: Tensor) -> float:
    both = torch.cat([x, y], 1).T
    return 0.5 * float(x.T.cov().reshape(x.shape[1], -1).logdet() + y.T.cov().reshape(y.shape[1], -1).logdet() - both.cov().logdet())


def token_cka(tokens: Tensor, *, debiased: bool) -> Tensor:
    from sosie.linalg import centred_grams, u_centred

    grams = centred_grams(tokens.transpose(0, 1).double())
    grams = u_centred(grams) if debiased else grams
    flat = torch.nn.functional.normalize(grams.flatten(1), dim=1)
    return flat @ flat.T
