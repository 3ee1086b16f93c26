"""Folders of Hugging Face models, opened by transformers itself: with their tokenisers, without their code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sosie
from sosie.models import Tokenise, open_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")

from tiny_transformers import bert  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = tmp_path / "tiny-bert"
    bert().save_pretrained(found)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]")
    fast.save_pretrained(found)
    return found


def test_a_folder_is_a_model_with_its_tokeniser(folder: Path) -> None:
    opened = open_model(f"hf:{folder}")
    assert isinstance(opened.prepare, Tokenise)
    assert not opened.model.training
    for name, weight in bert().state_dict().items():
        torch.testing.assert_close(opened.model.state_dict()[name], weight, rtol=0, atol=0)
    texts = [" ".join("abc"[(i * j) % 3] for j in range(1 + i % 5)) for i in range(40)]
    ids = [[" abc".index(word) + 1 for word in text.split()] for text in texts]
    made = {"input_ids": torch.tensor([row + [0] * (5 - len(row)) for row in ids])}
    made["attention_mask"] = made["input_ids"] != 0
    c = sosie.compare(f"hf:{folder}", bert(1), texts, rows="mean", prepare_b=opened.prepare)
    np.testing.assert_allclose(c.matrix(), sosie.compare(bert(), bert(1), made, rows="mean").matrix(), atol=1e-6)
    d = sosie.compare(
        f"hf:{folder}", bert(1), {"text": texts, "label": torch.ones(40)}, rows="mean", prepare_b=opened.prepare
    )
    np.testing.assert_array_equal(c.matrix(), d.matrix())
    sosie.compare(f"hf:{folder}", bert(1), made, rows="mean")  # token ids need no tokeniser


def test_a_folder_of_pickles_is_refused(folder: Path) -> None:
    torch.save(bert().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin, which sosie does not unpickle"):
        open_model(f"hf:{folder}")


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="evil", auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="code of its own, which sosie does not run"):
        open_model(f"hf:{folder}")
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_lacks_layers_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"no weights for encoder\.layer\.3.* and \d+ more, which would be random"):
        open_model(f"hf:{folder}")
