"""Table 1, scaled down: a small vision transformer that drops tokens, with and without CKA-SR and token CKA."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import looking
import torch
from data import probes
from settings import CKA_SR, NONE, Arm, Settings
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import Job, fit_dynamic, fit_models, tested

RULES = ("learned", "cka", "eq13")
EQ13_BATCH = 100  # token CKA as printed is one of the batch; its memory grows with the square


def table_1(settings: Settings) -> dict[str, Any]:
    """Two transformers, then two dynamic ones of each; the rule of what to keep is changed after training."""
    chosen = settings.tokens
    first = {arm.name: pretrained(settings, arm) for arm in (NONE, CKA_SR)}
    plain = {name: 100 * tested(settings, model, chosen.dataset, 500) for name, model in first.items()}
    whole = cost(settings, first["none"])
    numbers: dict[str, float | None] = {f"plain_{name}": value for name, value in plain.items()}
    alike = {name: looking.similarity(settings, model, chosen.dataset) for name, model in first.items()}
    numbers["cka_sr_debiased_fall"] = less(alike["none"]["debiased"], alike["cka_sr"]["debiased"])
    rows = []
    models = fit_dynamic(settings, [copy.deepcopy(first[name]) for name in first for _ in chosen.keeps],
                         [keep for _ in first for keep in chosen.keeps])  # fmt: skip
    cases = [(name, keep) for name in first for keep in chosen.keeps]
    for (name, keep), model in zip(cases, models, strict=True):
        found: dict[str, Any] = {"pretrained": name, "keep": keep, "accuracy": {}, **cost(settings, model)}
        for rule in RULES:
            model.rule = rule  # type: ignore[assignment]
            batch = EQ13_BATCH if rule == "eq13" else 500
            found["accuracy"][rule] = 100 * tested(settings, model, chosen.dataset, batch)
        rows.append(found)
    for place, keep in zip(("low", "high"), chosen.keeps, strict=True):
        without, with_ = (next(r for r in rows if (r["pretrained"], r["keep"]) == (name, keep)) for name in first)
        numbers |= {
            f"{place}_accuracy": without["accuracy"]["learned"],
            f"{place}_gain": with_["accuracy"]["cka"] - without["accuracy"]["learned"],
            f"{place}_gain_of_penalty": with_["accuracy"]["learned"] - without["accuracy"]["learned"],
            f"{place}_gain_of_tokens": without["accuracy"]["cka"] - without["accuracy"]["learned"],
            f"{place}_gain_as_printed": with_["accuracy"]["eq13"] - without["accuracy"]["learned"],
            f"{place}_loss": plain["none"] - without["accuracy"]["learned"],
            f"{place}_flops": without["flops"] / whole["flops"],
            f"{place}_params": without["params"] / whole["params"],
        }
    return {"numbers": numbers, "plain": {"accuracy": plain, **whole, "similarity": alike}, "rows": rows}


def pretrained(settings: Settings, arm: Arm) -> nn.Module:
    chosen = settings.tokens
    options = tuple((key, getattr(chosen, key)) for key in ("depth", "width", "patch"))
    model = Job(chosen.dataset, "vit", chosen.first, 0, arm, options=options).build(settings.device)
    with ExitStack() as stack:
        penalty = looking.penalty_of(model, arm)
        own = penalty and stack.enter_context(penalty)
        fit_models(settings, [model], chosen.dataset, chosen.first, [0], penalties=[own])
    return model


@torch.no_grad()
def cost(settings: Settings, model: nn.Module) -> dict[str, int]:
    """Parameters, and operations of one image in evaluation (a multiplication and an addition are two)."""
    x = probes(settings, settings.tokens.dataset, 1)
    with FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return {"params": sum(each.numel() for each in model.parameters()), "flops": counter.get_total_flops()}


def less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
