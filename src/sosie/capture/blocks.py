"""Which sites to take when nobody says: a model's repeated blocks, or the layers of a plain net."""

from __future__ import annotations

from collections import defaultdict
from inspect import getattr_static

from torch import nn

from .names import Names, ancestors

_UNCHANGED_AT_EVAL = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Flatten)


def default_sites(names: Names) -> list[str]:
    """Repeated blocks where the model has them, else every layer that changes what passes through it."""
    found = repeated_blocks(names)
    if not found:
        found = [name for name in names.leaves() if not isinstance(names.by_name[name], _UNCHANGED_AT_EVAL)]
    return found or [""]


def repeated_blocks(names: Names) -> list[str]:
    """The outermost modules with children whose class occurs at least twice; of a stack its layers."""
    blocks = {name: module for name, module in names.unique().items() if _is_block(names, name)}
    repeated = _repeated_classes(names, blocks)
    found: list[str] = []
    inside: set[str] = set()
    for name, module in blocks.items():
        if inside.intersection(ancestors(name)):
            continue
        if type(module) in repeated and not _is_stack(names, name):
            found.append(name)
            inside.add(name)
    return found


def _is_block(names: Names, name: str) -> bool:
    """A part of the model that computes something out of other parts; no mere container of them."""
    kind = type(names.by_name[name])
    if not name or names.is_leaf(name) or kind is nn.Sequential:
        return False
    # Looked up without descriptors: a scripted module's forward cannot be read off its class.
    return getattr_static(kind, "forward") is not nn.Module.forward


def _repeated_classes(names: Names, blocks: dict[str, nn.Module]) -> set[type]:
    where = defaultdict(list)
    for name, module in blocks.items():
        where[type(module)].append(name)
    return {kind for kind, found in where.items() if len(found) > 1 and not _parts_of_one(names, found)}


def _is_stack(names: Names, name: str) -> bool:
    """Whether a module is one half of a model, as T5's encoder and decoder are, and its listed layers the blocks.

    A block of a block is none: blocks are numbered themselves, and few are mostly one list of one class.
    """
    if name.rpartition(".")[2].isdecimal():
        return False
    leaves = sum(name in ancestors(leaf) for leaf in names.leaves())
    for child, module in names.by_name[name].named_children():
        listed = f"{name}.{child}"
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(layer) for layer in module}) == 1:
            inside = sum(listed in ancestors(leaf) for leaf in names.leaves())
            if _is_block(names, f"{listed}.0") and 2 * inside >= leaves:
                return True
    return False


def _parts_of_one(names: Names, found: list[str]) -> bool:
    """Whether all lie in one block of which they are the lesser part, as two MLPs beside an attention do.

    An encoder that is nothing but its layers is the opposite case: there the layers are the blocks.
    """
    shared = set(ancestors(found[0])).intersection(*map(ancestors, found[1:]))
    home = max((name for name in shared if name == "" or _is_block(names, name)), key=len)
    if home == "":
        return False
    leaves = [name for name in names.leaves() if home in ancestors(name)]
    covered = [name for name in leaves if set(found).intersection(ancestors(name))]
    return 2 * len(covered) < len(leaves)
