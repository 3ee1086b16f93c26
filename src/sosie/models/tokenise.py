"""A text model's own tokeniser, applied to lists of strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Tokenise:
    """Texts, or a dict with one list of them, become a model's arguments: token ids, and a mask of the padding."""

    tokenizer: Any
    text_only: ClassVar[bool] = True  # batches of token ids are passed on as they are

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token is None:  # GPT-like: any token will do, as the mask leaves it out
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def __call__(self, batch: Any) -> Any:
        columns = batch if isinstance(batch, Mapping) else {"": batch}
        texts = [part for part in columns.values() if isinstance(part, list) and isinstance(part[0], str)]
        if len(texts) != 1:
            raise ValueError(f"which of {', '.join(columns)} is the text? Give a prepare that says so")
        return self.tokenizer(texts[0], padding=True, truncation=True, return_tensors="pt")

    def __repr__(self) -> str:
        return f"{type(self.tokenizer).__name__} of {self.tokenizer.vocab_size} tokens"
