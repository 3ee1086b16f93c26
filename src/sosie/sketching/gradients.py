"""Run a network backwards: the gradient at its answer, and rows of features and gradients at every site."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.batches import Chunk, count_inputs, rebuild, with_tensors, without_labels
from ..capture.rows import needs_axes, to_rows
from ..capture.sites import Keep, Site, answer_in, fresh_leaf, select, unshared, watch
from ..checks import positive
from ..engine.network import Network
from ..engine.stream import Stream
from ..process_state import matmul_precision, without_autocast
from ..progress import Progress

Loss = Callable[[Any, Any], Tensor]
Rows = Callable[[str, Tensor], None]
BETA = 0.5
NOTED = 4096  # finiteness flags that are collected before the GPU is synchronised
_SUMS_TO_ONE = 1e-3
_OTHERWISE = "give output=function(answer, batch) → one loss per input"
_FIXED = f"with a fixed variance every gradient is exactly 0, whatever beta. Add a variance head, or {_OTHERWISE}"

# The gradient of an expected loss at a network's answer, which one backward pass carries to every site


@dataclass(frozen=True)
class Predictive:
    """The loss whose gradient a backward pass carries to the sites, in words and as a function.

    `pull(answer, batch, mask, check)` returns a part of the answer and the gradient of the loss with respect to it;
    with `check` it first raises unless the answer can be read in this way.
    """

    words: str
    pull: Callable[[Any, Any, Tensor | None, bool], tuple[Tensor, Tensor]]


def predictive_of(output: str | Loss, beta: float) -> Predictive:
    """The predictive of a model that returns "logits" or "gaussian" predictions, or of the user's own loss."""
    if callable(output):
        name = getattr(output, "__qualname__", type(output).__qualname__)
        return Predictive(f"loss {name}", partial(_pull_at_losses, output))
    pulls = {"logits": _pull_at_logits, "gaussian": _pull_at_log_variance}
    if output not in pulls:
        raise ValueError(f"output is 'logits', 'gaussian' or a function(answer, batch) → losses, got {output!r}")
    if positive(beta, "beta", most=1, why="it tempers the prediction, q ∝ p^beta") == 1:
        raise ValueError(
            "beta=1 gives gradients of exactly 0: the expected loss is smallest under the model's own prediction. Take "
            "beta below 1 (the paper takes 0.5), or a loss of your own"
        )
    return Predictive(f"{output}, beta {beta:g}", partial(pulls[output], beta))


class NoHead(ValueError):
    """A model without a head has no loss, and so no gradients."""


def _pull_at_logits(beta: float, answer: Any, batch: Any, mask: Tensor | None, check: bool) -> tuple[Tensor, Tensor]:
    """The logits and p − q, the gradient of −log p(y) expected under the tempered prediction q ∝ p^β, held fixed."""
    logits = answer_in(answer)
    if check and isinstance(answer, Mapping) and "last_hidden_state" in answer and answer.get("logits") is None:
        raise NoHead(
            "output='logits', but the model returns hidden states, since it has no head: take one with a head "
            f"(hf:folder(head=True)), sketch kernels='features' alone, or {_OTHERWISE}"
        )
    if logits is None or not logits.is_floating_point():
        kind = type(answer).__name__ if logits is None else str(logits.dtype).removeprefix("torch.")
        raise ValueError(f"output='logits', but the model returns {kind}; {_OTHERWISE}")
    # In float64, since a confident p − q is the difference of two numbers near 1.
    exact = logits.detach().double()
    if check:
        inputs = count_inputs(batch)
        if logits.ndim not in (2, 3) or len(logits) != inputs or logits.shape[-1] < 2:
            raise ValueError(
                "output='logits' means (inputs, classes) or (inputs, tokens, classes), at least two classes; the model "
                f"returns {tuple(logits.shape)} for {inputs} inputs; {_OTHERWISE}"
            )
        if bool(((exact.sum(-1) - 1).abs().amax() < _SUMS_TO_ONE) & (exact >= 0).all()):
            raise ValueError(
                "output='logits', but the model returns probabilities (they sum to 1): remove its softmax, or "
                f"{_OTHERWISE}"
            )
    pull = torch.softmax(exact, -1) - torch.softmax(beta * exact, -1)
    if logits.ndim == 3 and mask is not None and mask.shape == logits.shape[:2]:
        pull = pull * mask.to(pull)[..., None]
    return logits, pull.to(logits.dtype)


def _pull_at_log_variance(
    beta: float, answer: Any, batch: Any, mask: Tensor | None, check: bool
) -> tuple[Tensor, Tensor]:
    """The log-variances of normal predictions and their gradient, (1 − 1/β) / 2; q ∝ p^β has variance σ² / β.

    The gradient at the mean is 0, since q is symmetric about it.
    """
    if isinstance(answer, Mapping) and {"mean", "log_variance"} <= set(answer):
        answer = (answer["mean"], answer["log_variance"])
    if not (isinstance(answer, Sequence) and len(answer) == 2 and all(isinstance(part, Tensor) for part in answer)):
        raise ValueError("output='gaussian' needs a model that returns (mean, log_variance) or such a dict: " + _FIXED)
    mean, log_variance = answer
    if check and (log_variance.shape != mean.shape or len(mean) != count_inputs(batch)):
        raise ValueError(
            "output='gaussian' means a mean and a log-variance of one shape, (inputs, …); for "
            f"{count_inputs(batch)} inputs the model returns {tuple(mean.shape)} and {tuple(log_variance.shape)}"
        )
    if check and not log_variance.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"the log-variance does not depend on what the network computes: {_FIXED}")
    return log_variance, torch.full_like(log_variance, (1 - 1 / beta) / 2)


def _pull_at_losses(function: Loss, answer: Any, batch: Any, mask: Tensor | None, check: bool) -> tuple[Tensor, Tensor]:
    """The user's own losses, one per input, and their gradient."""
    losses, inputs = function(answer, batch), count_inputs(batch)
    if not isinstance(losses, Tensor) or losses.shape != (inputs,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"the loss must return one number per input, a tensor ({inputs},), got {got}")
    return losses, torch.ones_like(losses)


@dataclass
class GradientNetwork(Network):
    """A network that yields rows of features and of gradients, from one forward and one backward pass."""

    predictive: Predictive = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leaves: list[Tensor] = []  # where the graph begins
        self._backward: Rows | None = None
        self._keep = Keep()
        self._reached: set[str] = set()  # sites with a gradient
        self._checked = False
        self._noted: list[tuple[str, int, int, Tensor]] = []

    @contextmanager
    def opened(self) -> Iterator[GradientNetwork]:
        with ExitStack() as stack:
            stack.enter_context(self.borrowed())
            if any(parameter.is_inference() for parameter in self.model.parameters()):
                raise ValueError(
                    f"the weights of {self.name} were made in torch.inference_mode, so nothing can be differentiated: "
                    "copy.deepcopy(model) outside of it"
                )
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)  # only sites get gradients; restored at the end
            for request in select(self.model, self.sites).values():
                stack.callback(request.module.register_forward_hook(self._begin_graph).remove)
            self._seen = stack.enter_context(
                watch(self.model, self.sites, sink=self._receive, axes=needs_axes(self.rows))
            )
            try:
                yield self
            finally:
                self._seen = None

    def chunks(self, stream: Stream, *, task: str) -> Iterator[Chunk]:
        """The data in the loader's batches; numbers that are not finite raise an error, at the end at the latest."""
        yield from chunks_of(stream, f"{task} {self.name}")
        self.check_finite()

    def _begin_graph(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook that begins the graph at the first sites, so that nothing is kept below them."""
        if self._backward is None:
            return None
        if (fresh := fresh_leaf(output, anew=not self._leaves)) is None:
            return unshared(output)  # with an in-place operation on a view, the gradient would bypass the hook
        leaf, replacement = fresh
        self._leaves.append(leaf)
        return replacement

    def _receive(self, site: Site, activation: Tensor) -> Any:
        # Rows may be a view of the activation, which the model may overwrite before its gradient arrives.
        kept = self._keep(site, activation.detach())
        if self._backward is not None and activation.requires_grad:
            activation.register_hook(lambda gradient: self._receive_gradient(site, kept, gradient))
        return super()._receive(site, kept)

    def _receive_gradient(self, site: Site, kept: Tensor, gradient: Tensor | None) -> None:
        assert self._backward is not None
        assert self._chunk is not None
        if gradient is None:  # quantised layers, for one
            raise ValueError(f"no gradient reaches {site.label}: what follows it cannot be differentiated")
        self._keep.check(site.label, kept)
        mask = self._masks.at(site, gradient)
        self._reached.add(site.label)
        self._backward(site.label, to_rows(gradient, self.rows, site=site, inputs=self._chunk.count, mask=mask))

    def look(self, batch: Any) -> Any:
        self._keep.start()
        with torch.inference_mode(False):  # in inference mode tensors have no version that shows in-place changes
            side = super().look(batch)
        self._keep.learn()
        return side

    def read_rows(self, chunk: Chunk, features: Rows, gradients: Rows | None) -> None:
        """Run a forward pass and, with `gradients`, a backward pass; features come before gradients."""
        if gradients is None:
            with matmul_precision("ieee"):
                self.read(chunk, features)
            return
        seen = self._watched()
        self._sink, self._chunk, self._backward = features, chunk, gradients
        self._leaves, self._reached, self._counts = [], set(), {}
        self._keep.start()
        try:
            # Nothing can be differentiated in inference mode, which the caller may have on.
            with matmul_precision("ieee"), self._named_in_errors(chunk), torch.inference_mode(False):
                with torch.no_grad():
                    args, kwargs = self.arguments(chunk)
                self._masks = self.masks(chunk.batch, args, kwargs)
                with torch.enable_grad():
                    answer = self.model(*args, **kwargs)
                    seen.values()  # raises if a site did not fire
                    self._run_backwards(answer, chunk)
        finally:
            self._keep.learn()
            self._sink = self._chunk = self._backward = None
            self._leaves = []

    def _run_backwards(self, answer: Any, chunk: Chunk) -> None:
        mask = self._masks.decoder if self._masks.halves else self._masks.tokens
        # Under autocast, products of gradients would be in half precision.
        with without_autocast(self.home.type):
            part, cotangent = self.predictive.pull(answer, chunk.batch, mask, not self._checked)
            self._checked = True
            if not part.requires_grad or not self._leaves:
                raise ValueError(
                    f"the answer of {self.name} does not depend on any site in a way that can be differentiated: "
                    "choose sites that the answer is computed from, and a forward without torch.no_grad()"
                )
            self.note_finite("the answer or the loss is", part)
            torch.autograd.grad(part, self._leaves, cotangent, allow_unused=True)
        silent = [site.label for site in self._watched().sites if site.label not in self._reached]
        if silent:
            raise ValueError(
                f"no gradient reaches {', '.join(silent)}: the answer does not depend on "
                f"{'it' if len(silent) == 1 else 'them'}; choose other sites"
            )

    def note_finite(self, what: str, numbers: Tensor) -> None:
        """Note whether these numbers of the chunk are finite, to be read later without synchronising a GPU."""
        assert self._chunk is not None
        flag = (numbers.detach() * 0).sum(dtype=torch.float64)  # NaN if a number is not finite, else 0
        self._noted.append((what, self._chunk.start, self._chunk.count, flag))
        if not flag.is_cuda or len(self._noted) >= NOTED:
            self.check_finite()

    def check_finite(self) -> None:
        """Raise if a noted number is not finite, naming the place and the inputs."""
        noted, self._noted = self._noted, []
        flags = torch.stack([flag.to(noted[0][-1].device) for *_, flag in noted]).isnan().tolist() if noted else []
        if True in flags:
            what, start, count, _ = noted[flags.index(True)]
            raise ValueError(
                f"{self.name}: {what} NaN or infinite for some of the inputs {start} to {start + count - 1}, or too "
                "large to be squared; look at those inputs, or at the weights"
            )


def chunks_of(stream: Stream, task: str) -> Iterator[Chunk]:
    """The data in the loader's batches, with a progress bar."""
    with Progress(task, stream.expected, "inputs") as bar:
        for chunk in stream.chunks(block=None):
            yield chunk
            bar.advance(chunk.count)


# One number per input, which shows whether two passes read the same data


def input_numbers(batch: Any, count: int, device: torch.device | None = None) -> Tensor:
    """(count,) in float64: a fixed random combination of the numbers of each input, without labels."""
    leaves: list[Any] = []
    rebuild(leaves.append, with_tensors(without_labels(batch)))
    total = torch.zeros(count, dtype=torch.float64, device=device)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count:
            rows = leaf.detach().reshape(count, -1)
            rows = rows.abs() if rows.is_complex() else rows
            # In float32 on the device of the data, so that only one number per input moves.
            numbers = (rows.float() @ _weights(rows.shape[1], k, rows.device)).double()
        elif isinstance(leaf, (list, tuple)) and len(leaf) == count:
            numbers = torch.tensor([zlib.crc32(repr(item).encode()) / 2**32 for item in leaf], dtype=torch.float64)
        else:
            continue
        total += numbers.to(total.device, non_blocking=total.is_cuda)
    return torch.nan_to_num(total)  # NaN would hide any difference


@lru_cache(maxsize=16)
def _weights(width: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device has the same
    with torch.inference_mode(False):
        return torch.randn(width, generator=generator).to(device, non_blocking=True)
