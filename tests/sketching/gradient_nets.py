"""Small networks whose gradients are looked at, and what they are by one backward pass an input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

N = 12


class InPlace(nn.Module):
    """Batch norm, in-place ReLUs right after the sites, and an answer that is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.r1 = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.c2, self.r2, self.c3 = nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)
        self.flat, self.r3, self.fc = nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(16, 5)
        self.b1.running_mean.copy_(torch.randn(3))
        self.b1.running_var.copy_(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c3(self.r2(self.c2(self.r1(self.b1(self.c1(x))))))
        return self.fc(self.r3(self.flat(x))).mul_(1.5)  # r3 works in place on a view


class Residual(nn.Module):
    """One block called twice around a skip connection, then branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Linear(6, 7), nn.Linear(7, 7)
        self.left, self.right, self.head = nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        x = x + self.mix(x).tanh()
        y = self.mix(x)
        y += x
        return self.head(self.left(y) * self.right(y).sigmoid())


class Wrapped(nn.Module):
    """The site returns a tuple, a dict or a record, and so does the model."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.head = _Inner(wrap), nn.Linear(4, 3)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.head(self.unwrap(self.inner(x)).tanh_()))


class _Inner(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(6, 4), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))


class Words(nn.Module):
    """Tokens through attention that leaves padding out, and a class for each text or for each token."""

    def __init__(self, *, each: bool = False) -> None:
        super().__init__()
        self.embed, self.each, self.head = nn.Embedding(20, 6), each, nn.Linear(6, 4)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        if self.each:
            return self.head(hidden)
        shown = attention_mask[..., None].to(hidden)
        return self.head((hidden * shown).sum(1) / shown.sum(1))


def words(n: int = N, longest: int = 5) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, longest + 1, (n, 1), generator=random)
    mask = torch.arange(longest) < lengths
    return {"input_ids": torch.randint(1, 20, (n, longest), generator=random) * mask, "attention_mask": mask.long()}


def built(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """In float64, with every parameter moved a little."""
    torch.manual_seed(seed)
    model = kind().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def rows(n: int = N, width: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).double()


def images(n: int = N, seed: int = 2) -> Tensor:
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def tensor_in(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def expected_loss(beta: float) -> Callable[[Any], Tensor]:
    """−Σ q log p with q ∝ p^β held fixed, as the paper's Eq. 5 has it; averaged over nothing."""

    def loss(answer: Any) -> Tensor:
        logits = tensor_in(answer)
        q = torch.softmax(beta * logits.detach(), -1)
        return -(q * torch.log_softmax(logits, -1)).sum()

    return loss


def one_by_one(
    model: nn.Module, batch: Any, site: str, loss: Callable[[Any], Tensor], call: int = 1
) -> tuple[Tensor, Tensor]:
    """Features and gradients at one call of a module, each input by itself, by plain autograd."""
    model = copy.deepcopy(model).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    found: list[tuple[Tensor, Tensor]] = []
    count = len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
    for i in range(count):
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any, seen: list[Tensor] = seen) -> Any:
            seen.append(tensor_in(output))
            return _with(output, seen[-1].clone())

        handle = model.get_submodule(site).register_forward_hook(keep)
        one = {key: part[i : i + 1] for key, part in batch.items()} if isinstance(batch, dict) else batch[i : i + 1]
        answer = model(**one) if isinstance(one, dict) else model(one)
        handle.remove()
        activation = seen[call - 1]
        found.append((activation.detach(), torch.autograd.grad(loss(answer), activation)[0]))
    features, gradients = (torch.cat(part) for part in zip(*found, strict=True))
    return features, gradients


def by_differences(model: nn.Module, one: Any, site: str, beta: float, step: float = 1e-5) -> Tensor:
    """The gradient of one input at a site by central differences of the loss, q held fixed."""
    size = one_by_one(model, one, site, expected_loss(beta))[0].numel()
    with torch.no_grad():
        base = tensor_in(model(one))
        q = torch.softmax(beta * base, -1)
        moved: list[Tensor] = []
        for k in range(size):
            ends = []
            for sign in (1, -1):

                def push(module: nn.Module, args: Any, output: Any, k: int = k, sign: int = sign) -> Any:
                    changed = tensor_in(output).clone()
                    changed.view(-1)[k] += sign * step
                    return _with(output, changed)

                handle = model.get_submodule(site).register_forward_hook(push)
                ends.append(-(q * torch.log_softmax(tensor_in(model(one)), -1)).sum())
                handle.remove()
            moved.append((ends[0] - ends[1]) / (2 * step))
        return torch.stack(moved)


def _with(output: Any, new: Tensor) -> Any:
    if isinstance(output, Tensor):
        return new
    if isinstance(output, dict):
        changed = copy.copy(output)
        changed[next(iter(output))] = new
        return changed
    return (new, *output[1:])


def state_of(model: nn.Module) -> list[Any]:
    """What a pass must leave as it was."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return [
        hooks,
        [m.training for m in model.modules()],
        [(p.requires_grad, p.grad, p._version, p.data_ptr()) for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    ]
