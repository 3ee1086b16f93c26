"""Files as sosie writes them, checksum and all, with a content that sosie would not write."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosie.files import TENSORS_HASH, _parts, assemble, write_atomically


def save_file(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """As `safetensors.torch.save_file`, with NumPy arrays as well."""
    text = {key: value for key, value in metadata.items() if key != TENSORS_HASH}
    parts = _parts(
        {name: torch.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor for name, tensor in tensors.items()}
    )
    write_atomically(path, lambda temporary: assemble(temporary, parts, text))  # the old one may be mapped
