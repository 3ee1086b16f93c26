"""What all tests share: one thread each (two run side by side), and seeded rows."""

from __future__ import annotations

import pytest
import torch
from paired import correlated_rows

torch.set_num_threads(1)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return correlated_rows()
