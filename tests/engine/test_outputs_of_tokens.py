"""`compare_outputs` of language models: logits of tokens, padding, right answers, intervals by inputs."""

from __future__ import annotations

from collections.abc import Callable

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


class Softmax(Tagger):
    """Probabilities for each token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(input_ids, attention_mask)["logits"].softmax(-1)}


def test_probabilities_of_tokens_are_told_from_logits() -> None:
    def divergence(a: nn.Module, b: nn.Module, **options: str) -> float:
        c = sosie.compare_outputs(a, b, batches(), "jensen_shannon", **options)
        return float(c.matrix("jensen_shannon")[0, 0])

    expected = pytest.approx(divergence(Tagger(0), Tagger(1)), rel=1e-5)
    assert divergence(Softmax(0), Softmax(1)) == expected
    assert divergence(Softmax(0), Tagger(1)) == expected
    with pytest.raises(ValueError, match="rows are not probabilities"):
        divergence(Tagger(0), Tagger(1), kind="probabilities")


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


def accuracies(*arguments: object, **options: object) -> tuple[float, ...]:
    return tuple(sosie.compare_outputs(*arguments, **options).provenance["accuracy"])  # type: ignore[arg-type, union-attr]


def test_the_right_answers_do_not_depend_on_the_wrapper_or_the_order_of_models_and_arguments() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.model(input_ids, attention_mask)["logits"]

    a, b = TaggerForCausalLM(0), TaggerForCausalLM(1)
    expected = accuracies(a, b, batches())
    compiled = torch.compile(b, backend="eager")
    assert accuracies(a, nn.DataParallel(b), batches()) == accuracies(a, compiled, batches()) == expected
    assert accuracies(Wrapper(a), b, batches()) == accuracies(a, Wrapper(b), batches()) == expected
    assert accuracies(b, Tagger(0), batches()) == accuracies(Tagger(0), b, batches())[::-1]
    turned = [{"attention_mask": each["attention_mask"], "input_ids": each["input_ids"]} for each in batches()]
    assert accuracies(a, b, turned) == expected
    labelled = [
        each | {"labels": each["input_ids"].masked_fill(each["attention_mask"] == 0, -100)} for each in batches()
    ]
    assert accuracies(a, b, labelled) == accuracies(a, compiled, labelled) == expected


def test_labels_of_a_causal_model_are_moved_and_those_of_others_are_not() -> None:
    data = [each | {"labels": each["input_ids"].clone()} for each in batches()]
    for each in data:
        each["labels"][:, :3] = -100  # the prompt
        each["labels"][each["attention_mask"] == 0] = -100
    labels = torch.cat([each["labels"] for each in data])
    for kind, place in ((TaggerForCausalLM, slice(0, -1)), (Tagger, slice(1, None))):
        c = sosie.compare_outputs(kind(0), kind(1), data)
        known = labels[:, 1:] != -100
        right = (logits(kind(0))[0][:, place].argmax(-1) == labels[:, 1:])[known]
        assert (c.rows()[0]["n"], c.provenance["accuracy"][0]) == (
            len(right),
            pytest.approx(float(right.double().mean())),
        )


def test_a_decoder_has_its_own_padding() -> None:
    class Decoder(Tagger):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor,
                    decoder_attention_mask: Tensor) -> dict[str, Tensor]:  # fmt: skip
            return {"logits": self.head(self.words(decoder_input_ids))}

    (first, *_) = batches()
    data = [first | {f"decoder_{name}": each.flip(0) for name, each in first.items()}]
    data[0]["attention_mask"] = torch.ones_like(first["attention_mask"])
    c = sosie.compare_outputs(Decoder(0), Decoder(1), data, measures="agreement")
    assert c.rows()[0]["n"] == int(first["attention_mask"].sum())


def test_what_is_refused() -> None:
    def tokens(shift: int) -> Callable[[list[str]], dict[str, Tensor]]:
        return lambda texts: {
            "input_ids": torch.tensor([[(ord(letter) + shift) % 11 for letter in text] for text in texts]),
            "attention_mask": torch.ones(len(texts), len(texts[0])),
        }

    with pytest.raises(ValueError, match="tokenise the same text differently"):
        sosie.compare_outputs(Tagger(0), Tagger(1), [["abcd"] * 4], prepare_a=tokens(0), prepare_b=tokens(1))
    sosie.compare_outputs(Tagger(0), Tagger(1), [["abcd"] * 4], prepare_a=tokens(0), prepare_b=tokens(11))
    with pytest.raises(ValueError, match=r"set kind='logits' if these are \(inputs, tokens, vocabulary\)"):
        sosie.compare_outputs(Tagger(0, 5), Tagger(1, 5), batches())
    sosie.compare_outputs(Tagger(0, 5), Tagger(1, 5), batches(), kind="logits")
    with pytest.raises(ValueError, match="need the same classes on both sides, got 5 and 6"):
        sosie.compare_outputs(Tagger(0, 5), Tagger(1, 6), batches(), kind="logits")
    with pytest.raises(ValueError, match="none of the tokens of 40 inputs has a label"):
        sosie.compare_outputs(Tagger(0), Tagger(1), batches(), labels=torch.full((40, 7), -100))
    broken = Tagger(1)
    broken.head.weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match="logits of tokens are NaN or infinite, in input 0"):
        sosie.compare_outputs(Tagger(0), broken, batches())
    with pytest.raises(ValueError, match=r"need a label for each of 16 x 7 tokens"):
        sosie.compare_outputs(Tagger(0), Tagger(1), batches(), labels=lambda batch: torch.zeros(3, 7))
