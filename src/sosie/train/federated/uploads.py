"""What arrives at the server, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..stack import State

Receive = Callable[[int, int, State], Mapping[str, Tensor]]  # (round, client, upload) → the upload as it arrives


def arrived(
    turn: int, who: Sequence[int], sent: State, kept: State, receive: Receive | None
) -> tuple[State, list[int], dict[int, str]]:
    """Uploads that are fit for use, the places of their clients in `who`, and why others are dropped.

    `kept` is what the clients keep: one whose own part is not finite has diverged, and is dropped too.
    """
    reasons = _not_finite(who, kept)
    if receive is None:
        reasons |= _not_finite(who, sent)
        good = [k for k, client in enumerate(who) if client not in reasons]
        whole = len(good) == len(who)
        return (sent if whole else {name: stacked[good] for name, stacked in sent.items()}), good, reasons
    uploads: dict[int, Mapping[str, Tensor]] = {}
    for k, client in enumerate(who):
        upload = receive(turn, client, {name: stacked[k].clone() for name, stacked in sent.items()})
        wrong = _wrong_form(upload, sent)
        if wrong is None:
            # As the server will have it: a large number of double precision is infinite there.
            uploads[k] = {name: tensor.detach().to(sent[name]) for name, tensor in upload.items()}
        else:
            reasons[client] = wrong
    for k in list(uploads):
        one = {name: tensor.unsqueeze(0) for name, tensor in uploads[k].items()}
        reasons |= _not_finite([who[k]], one)
    good = [k for k, client in enumerate(who) if client not in reasons]
    stacked = {name: torch.stack([uploads[k][name] for k in good]) for name in sent} if good else {}
    return stacked, good, reasons


def mean(stacked: Tensor) -> Tensor:
    """Over clients; whole numbers (counts of batches) are rounded."""
    found = stacked.mean(0, dtype=torch.float64)  # in float32, the mean of equal numbers need not be that number
    return (found if stacked.is_floating_point() else found.round()).to(stacked.dtype)


def _not_finite(who: Sequence[int], state: State) -> dict[int, str]:
    """For each client with NaN or infinite numbers: where."""
    if not state:
        return {}
    rows = (stacked.reshape(len(who), -1) for stacked in state.values())  # a batch norm's count is one number a client
    fine = torch.stack([torch.isfinite(each).all(1) for each in rows])  # (names, clients)
    found: dict[int, str] = {}
    for name, row in zip(state, fine.tolist(), strict=True):
        for client, good in zip(who, row, strict=True):
            if not good:
                found.setdefault(client, f"{name} has values that are NaN or infinite")
    return found


def _wrong_form(upload: Any, sent: State) -> str | None:
    """What is wrong with the names and shapes of an upload."""
    if not isinstance(upload, Mapping):
        return f"the upload is a {type(upload).__name__}, not tensors by name"
    if missing := [name for name in sent if name not in upload]:
        return f"{missing[0]} is missing"
    if more := [name for name in upload if name not in sent]:
        return f"{more[0]} is not something that the server shares"
    for name, tensor in upload.items():
        wanted = tuple(sent[name].shape[1:])
        if not isinstance(tensor, Tensor):
            return f"{name} is a {type(tensor).__name__}, not a tensor"
        if tuple(tensor.shape) != wanted:
            return f"{name} is {tuple(tensor.shape)}, the server has {wanted}"
        if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided:
            return f"{name} ({tensor.dtype}, {tensor.layout}, {tensor.device}) holds no numbers that can be averaged"
    return None
