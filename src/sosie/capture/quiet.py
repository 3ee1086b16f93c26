"""Leaving models and the global random state as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..random_state import SEEDING
from .names import modules_of, parameters_of


@contextmanager
def as_found(models: nn.Module | Iterable[nn.Module], device: str | torch.device | None = None) -> Iterator[None]:
    """Models in eval mode without gradients, on `device` if one is given; afterwards everything as before.

    Put back, after an exception too: each submodule's training flag, each parameter's requires_grad and
    storage, the device, and the random states of torch (CPU, CUDA), NumPy's global generator and Python.
    Gradients are off through no_grad and not inference_mode: what a forward caches in a buffer must be able
    to enter a later backward.
    """
    found = [models] if isinstance(models, nn.Module) else list(models)
    unique = list({id(model): model for model in found}.values())
    target = None if device is None else torch.device(device)
    with ExitStack() as stack:
        stack.enter_context(kept_random_state(cuda=target is not None and target.type == "cuda"))
        modules = [stack.enter_context(_flags(model)) for model in unique]
        if target is not None:
            for model in unique:
                stack.enter_context(_placement(model, target))
        for model, parts in zip(unique, modules, strict=True):
            _evaluate(model, parts)
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, gradients as the caller has them; afterwards every flag as before."""
    with _flags(model) as modules:
        _evaluate(model, modules)
        yield


def _evaluate(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Eval mode; a model that is in it is left alone: setting hundreds of flags takes a good part of a millisecond."""
    if any(module.training for module in modules):
        model.eval()


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in float32 with all their digits on a GPU too (TF32 keeps three); afterwards as before."""
    if not torch.cuda.is_available():
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, flag in zip(switches, before, strict=True):
            switch.allow_tf32 = flag


@contextmanager
def _flags(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Afterwards each flag as before. Gives the model's modules, which take a while to go through."""
    modules = modules_of(model)
    training = [(module, module.training) for module in modules]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in parameters_of(model, modules)]
    if any(parameter.is_meta for parameter, _ in requires_grad):
        name = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
        raise ValueError(f"{name} is on the meta device, which holds no numbers: load the weights first")
    try:
        yield modules
    finally:
        for module, flag in training:
            if module.training != flag:
                module.training = flag  # not train(flag): it would go through the children, and may be overridden
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def _placement(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device; afterwards its parameters have their own storage again, not a copy."""
    if device.type == "meta":
        raise ValueError("the meta device holds no numbers: name a device that computes")
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but this torch ({torch.__version__}) finds no CUDA device")
    if len(homes) > 1:
        spread = ", ".join(sorted(map(str, homes)))
        raise ValueError(f"the model is spread over {spread}; leave device out and it is run where it is")
    try:
        model.to(device)
        yield
    finally:
        for home in homes:
            model.to(home)  # not only what was moved: a forward may have cached buffers on the device
        for parameter, own in data:
            parameter.data = own


@contextmanager
def kept_random_state(*, cuda: bool = False) -> Iterator[None]:
    with SEEDING:
        of_cuda = torch.cuda.get_rng_state_all() if cuda or torch.cuda.is_initialized() else None
        of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with SEEDING:  # not while another thread draws the weights of a model
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
            if of_cuda is not None:
                torch.cuda.set_rng_state_all(of_cuda)
