"""Reading sosie's own safetensors files: tensors, and text that says what they are. Nothing is unpickled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .storage import DamagedFile, OtherFile

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(
    path: str | os.PathLike[str], kind: str, version: int, what: str | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The text beside the tensors, and the tensors, on the CPU; refused unless the text says "sosie-<kind>".

    `version`: the newest format that is understood; `what`: the kind in words.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            text = opened.metadata() or {}
            if text.get("format") != f"sosie-{kind}":
                raise OtherFile(f"{path} is a safetensors file, but holds no {what or kind} of sosie's")
            if text.get("version") not in [str(known) for known in range(1, version + 1)]:
                said = str(text.get("version"))[:20]
                raise DamagedFile(f"{path} was written by a newer sosie (format {said}): upgrade sosie")
            return text, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{path} cannot be read as safetensors: {error}") from error
