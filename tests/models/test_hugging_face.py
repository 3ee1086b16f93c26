"""Folders of Hugging Face models, opened by transformers itself: with their tokenisers, without their code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sosie
from sosie.diffing import record
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


def test_texts_are_cut_where_the_model_ends(folder: Path) -> None:
    texts = [" ".join("abc"[(i * j) % 3] for j in range(30 + i % 5)) for i in range(40)]  # the model takes 32 tokens
    opened = open_model(f"hf:{folder}")
    c = sosie.compare({"bert": opened, "b": opened}, texts, rows="mean")
    assert c.matrix()[0, 0] == pytest.approx(1)
    long = len({text for text in texts if len(text.split()) > 32})
    assert f"{long} texts longer than the 32 tokens that bert reads: the rest was cut off" in c.rows()[0]["caveats"]
    short = [text[:50] for text in texts]
    again = sosie.compare({"bert": opened, "b": opened}, short, rows="mean")
    assert not any("cut off" in text for text in again.rows()[0]["caveats"])


def test_a_diff_says_where_tokenisers_differ(folder: Path) -> None:
    """Also where texts that come first have the same tokens."""
    texts = ["a a", "b a", "a c", "a"] * 8
    for old, new, place in (
        ("b", "d", "token 0 of text 1 is 3 in A and 1"),
        ("c", "d", "token 1 of text 2 is 4 in A and 1"),
    ):
        other = folder.with_name(f"without-{old}")
        shutil.copytree(folder, other)
        file = other / "tokenizer.json"
        file.write_text(file.read_text("utf-8").replace(f'"{old}":', f'"{new}":'))
        d = sosie.diff(f"hf:{folder}", f"hf:{other}", texts)
        assert (d.same, d.first) == (False, "input")
        assert f"by their own preparation: {place} in B" in d.verdict
    assert sosie.diff(f"hf:{folder}", f"hf:{other}", ["a a", "b a"]).same


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


def test_weights_that_the_model_has_no_layers_for_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"has weights of encoder\.layer\.2, which its config\.json has no place for"):
        open_model(f"hf:{folder}")


@pytest.fixture
def classifier(folder: Path) -> Path:
    """A fine-tuned model with a head of two classes, in the folder of the tokeniser."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=5, max_position_embeddings=32, num_labels=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=100)
    model.save_pretrained(folder)
    return folder


def test_a_head_is_read_where_answers_are_wanted(classifier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = f"hf:{classifier}"
    capfd.readouterr()
    assert type(open_model(spec).model).__name__ == "BertModel"
    assert "classifier" in dict(open_model(f"{spec}(head=True)").model.named_modules())
    texts = [" ".join("abc"[(i * j) % 3] for j in range(1 + i % 5)) for i in range(40)]
    found = sosie.compare_outputs(spec, spec, [(texts, [0, 1] * 20)])
    assert found.matrix("agreement").item() == 1
    whole = open_model(spec, head=True)
    answers = whole.model(**whole.prepare(texts)).logits.argmax(1)
    right = (answers == torch.tensor([0, 1] * 20)).float().mean().item()
    assert found.provenance["accuracy"] == pytest.approx([right, right])
    assert capfd.readouterr().err == "", "transformers reports the head that is left out"
    with pytest.raises(ValueError, match="has no option 'tail'; it has head, dtype, device_map"):
        open_model(f"{spec}(tail=True)")


def test_a_changed_head_is_another_model(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, turned := tmp_path / "turned")
    state = load_file(turned / "model.safetensors")
    save_file(
        {**state, "classifier.weight": -state["classifier.weight"]}, turned / "model.safetensors", {"format": "pt"}
    )
    texts = [" ".join("abc"[(i * j) % 3] for j in range(1 + i % 5)) for i in range(8)]
    path = record(f"hf:{classifier}", [texts], tmp_path / "golden.safetensors")
    for reference, data in ((f"hf:{classifier}", [texts]), (path, None)):
        found = sosie.diff(reference, f"hf:{turned}", data)
        assert found.first == "classifier"
        assert all("BertForSequenceClassification" in model for model in found.provenance["models"])
        with pytest.raises(AssertionError, match="classifier makes an error of 2"):
            sosie.assert_same(f"hf:{turned}", reference, data)
    assert sosie.diff(f"hf:{classifier}(head=False)", f"hf:{turned}(head=False)", [texts]).same
    mixed = sosie.diff(f"hf:{classifier}(head=False)", f"hf:{turned}", [texts])
    assert "hf:folder(head=False) leaves it out" in mixed.caveats[-1]


def test_a_repository_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns), "code or pickles"
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    opened = open_model("hf:org/bert@v2")
    assert (opened.name, opened.weights) == ("bert@v2", "weights of bert@v2")
    assert open_model("hf:org/bert").name == "bert@tiny-ber"
    assert asked == [("org/bert", "v2"), ("org/bert", None)]

    def fail(name: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("a page of advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        FileNotFoundError, match=r"hf:org/bert@v2: there is no folder org/bert here, and .* the network"
    ):
        open_model("hf:org/bert@v2")
    with pytest.raises(FileNotFoundError, match=r"no file bert-base.*A model of the Hugging Face Hub is hf:org/name"):
        open_model("hf:bert-base")
    with pytest.raises(ValueError, match=r"'bert' is not a repository"):
        open_model("hf:bert@v2")
