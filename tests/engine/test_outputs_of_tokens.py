"""`compare_outputs` of language models: logits of tokens, padding, right answers, intervals by inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.stats import outputs


class Tagger(nn.Module):
    """Logits of a class for each token."""

    def __init__(self, seed: int, classes: int = 11) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": 4 * self.head(self.words(input_ids))}


class TaggerForCausalLM(Tagger):
    """Logits of the next token."""


def batches(inputs: int = 40) -> list[dict[str, Tensor]]:
    ids = torch.randint(11, (inputs, 7), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7) < (torch.arange(inputs) % 4 + 4)[:, None]).long()
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(16), mask.split(16), strict=True)]


def logits(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        data = batches()
        all_logits = torch.cat([model(**batch)["logits"] for batch in data]).double()
    return all_logits, torch.cat([b["attention_mask"] for b in data]).bool(), torch.cat([b["input_ids"] for b in data])


def test_tokens_are_predictions_and_padding_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Tagger(0), Tagger(1)
    monkeypatch.setattr(outputs, "TOKEN_SLICE", 50)
    c = sosie.compare_outputs(a, b, batches(), measures=["agreement", "jensen_shannon"])
    (x, keep, _), (y, _, _) = logits(a), logits(b)
    assert c.matrix("agreement")[0, 0] == pytest.approx(float((x.argmax(-1) == y.argmax(-1))[keep].double().mean()))
    p, q = (each[keep].softmax(-1) for each in (x, y))
    m = (p + q) / 2
    divergence = ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)) / 2 / torch.tensor(2.0).log()
    assert c.matrix("jensen_shannon")[0, 0] == pytest.approx(float(divergence.mean()), rel=1e-6)
    row = c.rows()[0]
    assert (row["n"], c.provenance["inputs"]) == (int(keep.sum()), 40)
    assert row["low"] < row["value"] < row["high"]


def test_intervals_are_by_inputs() -> None:
    """As wide as with one token of each input, if all tokens of an input are the same."""
    data = [{"input_ids": b["input_ids"][:, :1].expand(-1, 7), "attention_mask": torch.ones(len(b["input_ids"]), 7)}
            for b in batches(300)]  # fmt: skip
    one = [{name: each[:, :1] for name, each in batch.items()} for batch in data]
    rows = [sosie.compare_outputs(Tagger(0), Tagger(1), d, measures=["agreement"]).rows()[0] for d in (data, one)]
    assert (rows[0]["low"], rows[0]["high"]) == pytest.approx((rows[1]["low"], rows[1]["high"]), rel=0.05)


def test_the_right_answer_of_a_causal_model_is_the_next_token() -> None:
    a, b = TaggerForCausalLM(0), TaggerForCausalLM(1)
    c = sosie.compare_outputs(a, b, batches())
    x, keep, ids = logits(a)
    answered = keep[:, 1:]
    right = (x[:, :-1].argmax(-1) == ids[:, 1:])[answered]
    assert c.provenance["accuracy"][0] == pytest.approx(float(right.double().mean()))
    assert {row["measure"] for row in c.rows()} >= {"agreement", "error_overlap", "jensen_shannon"}
    labels = torch.full((40, 7), -100)
    labels[:, 0] = 3
    c = sosie.compare_outputs(a, b, batches(), labels=lambda batch: labels[: len(batch["input_ids"])])
    assert (c.rows()[0]["n"], c.provenance.get("tokens", 40)) == (40, 40)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set kind='logits' if these are \(inputs, tokens, vocabulary\)"):
        sosie.compare_outputs(Tagger(0, 5), Tagger(1, 5), batches())
    sosie.compare_outputs(Tagger(0, 5), Tagger(1, 5), batches(), kind="logits")
    with pytest.raises(ValueError, match="need the same classes on both sides, got 5 and 6"):
        sosie.compare_outputs(Tagger(0, 5), Tagger(1, 6), batches(), kind="logits")
    broken = Tagger(1)
    broken.head.weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match="logits of tokens are NaN or infinite, in input 0"):
        sosie.compare_outputs(Tagger(0), broken, batches())
    with pytest.raises(ValueError, match=r"need a label for each of 16 x 7 tokens"):
        sosie.compare_outputs(Tagger(0), Tagger(1), batches(), labels=lambda batch: torch.zeros(3, 7))
