"""What goes around a cut: information about the input that reaches the answer without passing the site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import CallArguments
from .names import Names
from .outputs import activation_in, answer_in, path_to_tensor, replaced
from .sites import Site, SiteError

_SHOWN = 3  # names in an error message


class LeakingCut(SiteError):
    """The answer does not follow from the activation at the site alone."""


def leaking(site: Site, found: Sequence[tuple[str, str]]) -> LeakingCut:
    """The error, from what goes around (in words) and the module that it goes into ("" if that is not known)."""
    ways = [f"{label} goes around it" + (f" into {into}" if into else "") for label, into in found]
    more = f" and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
    known = f"{'; '.join(ways[:_SHOWN])}{more}" if ways else "no layer's output shows how (a branch, or whole numbers?)"
    where = next((into for _, into in found if into), "")
    advice = f"cut at {where!r}, where they meet, or further up" if where else "cut where all paths have met"
    return LeakingCut(
        f"with the activation at {site.label!r} held fixed, the answer still depends on the input: {known}; {advice}"
    )


def other_content(call: CallArguments) -> CallArguments:
    """The first input that differs from input 0, in one row, with input 0's masks and positions."""
    first = call.inputs(0, 1).named_leaves()
    content = [i for i, (name, leaf) in enumerate(first) if not is_mask(name, leaf)]
    for row in range(1, call.count()):
        leaves = call.inputs(row, row + 1).leaves()
        if any(not _equal(first[i][1], leaves[i]) for i in content):
            mixed = [leaves[i] if i in content else leaf for i, (_, leaf) in enumerate(first)]
            return call.map(lambda *_, rest=iter(mixed): next(rest))
    raise ValueError(f"whether a cut leaks shows on two different inputs; these {call.count()} are all the same")


def is_mask(name: str, leaf: Any) -> bool:
    """Says which tokens count, or where they stand, and not what they are."""
    return isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or name.endswith(("mask", "position_ids")))


def changed_outputs(
    root: nn.Module,
    run: Callable[[Callable[[Any], Any], CallArguments], Any],
    activation: Tensor,
    calls: Sequence[CallArguments],
) -> list[str]:
    """The layers below a site, last first, that the answer is directly made from and that differ between two inputs.

    `run(at_site, call)` is a forward with a function applied to the site's output. Below the site each layer's output
    is cut off from its own inputs, so that a gradient of the answer reaches only what was used as it stands.
    """
    names = Names.of(root)
    seen: list[dict[str, tuple[Tensor, bool]]] = []
    for call in calls:
        outputs: dict[str, Tensor] = {}
        answer = _forward_with_loose_layers(names, run, activation, call, outputs)
        reached: Sequence[Tensor | None] = [None] * len(outputs)
        if answer is not None and answer.requires_grad and outputs:
            with torch.enable_grad():
                total = answer.sum()
            reached = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
        seen.append({name: (outputs[name], grad is not None) for name, grad in zip(outputs, reached, strict=True)})
    one, other = seen
    both = [name for name in one if name in other and one[name][1]]
    return [
        f"the output of {name}" for name in reversed(both) if not _equal(one[name][0].detach(), other[name][0].detach())
    ]


def _forward_with_loose_layers(
    names: Names,
    run: Callable[[Callable[[Any], Any], CallArguments], Any],
    activation: Tensor,
    call: CallArguments,
    outputs: dict[str, Tensor],
) -> Tensor | None:
    below = True

    def at_site(output: Any) -> Any:
        nonlocal below
        below = False
        path = path_to_tensor(output)
        return output if path is None else replaced(output, path, activation.detach().clone())

    def loosen(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def fire(module: nn.Module, args: Any, output: Any) -> Any:
            found = activation_in(output)
            path = path_to_tensor(output)
            if not below or isinstance(found, str) or path is None:
                return None
            outputs[name] = found.detach().requires_grad_()
            return replaced(output, path, outputs[name].clone())  # a clone: the model may go on in place

        return fire

    handles = [names.by_name[name].register_forward_hook(loosen(name)) for name in names.leaves()]
    try:
        with torch.enable_grad():
            return answer_in(run(at_site, call))
    finally:
        for handle in handles:
            handle.remove()


def _equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
