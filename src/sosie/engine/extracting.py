"""`extract`: the activations of a model as rows, in one file, streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..capture import ACTIVATIONS, ACTIVATIONS_VERSION, ONE_ROW, Rule, check_rule, gives_several_rows
from ..checks import one_of
from ..files import CODES, PIECE, Part, assemble, check_writable, write_atomically
from ..progress import Progress
from .network import Network, digest_of_first
from .stream import Stream, chunk_on_cpu

DTYPES = ("float16", "bfloat16", "float32", "float64")


def extract(
    model: Any,
    data: Any,
    *,
    out: str | os.PathLike[str],
    sites: Any = None,
    rows: Rule = "flatten",
    name: str | None = None,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    max_rows: int | None = None,
) -> Path:
    """Write the activations of a model as rows into one .safetensors file, from one pass; returns its path.

    The file has an array (inputs, features) for each site, in execution order; with rows="positions" (inputs,
    positions, features). `sosie.compare("a.safetensors", model_b, data)` reads it, and so does any reader of
    safetensors. Rows are written as they are made, so memory does not grow with their number, and the file appears
    when it is whole. It takes inputs × features × 4 bytes per site; `dtype="float16"` halves that, with three digits
    left of each number. `name` is the name that comparisons show, else that of the file. `data`, `sites`, `rows`,
    `prepare`, `inputs`, `device` and `max_rows` are those of `sosie.compare`.
    """
    check_rule(rows)
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"activations are written as .safetensors, got out={str(out)!r}")
    check_writable(out)
    kept = None
    if dtype is not None:
        kept = getattr(torch, one_of(str(dtype).removeprefix("torch."), "dtype", DTYPES))
    otherwise = ". The call is extract(model, data, out='a.safetensors')"
    network = Network.of(
        model, name=name, sites=sites, rows=rows, prepare=prepare, inputs=inputs, device=device, otherwise=otherwise
    )

    def write(path: Path) -> None:
        spools: dict[str, _Spool] = {}
        try:
            about = _run(network, data, max_rows, spools, path, kept)
            # The widest numbers first, so that all are aligned.
            parts = [spool.part() for spool in sorted(spools.values(), key=lambda spool: -spool.item)]
            text = {"format": f"sosie-{ACTIVATIONS}", "version": str(ACTIVATIONS_VERSION)}
            assemble(path, parts, text | {"about": json.dumps({**about, "name": name})})
        finally:
            for spool in spools.values():
                spool.path.unlink(missing_ok=True)

    return write_atomically(out, write)


class _Spool:
    """The rows of one site so far, in a temporary file: their number is known only at the end."""

    def __init__(self, site: str, path: Path, rows: Tensor) -> None:
        self.site, self.path, self.inputs = site, path, 0
        self.shape, self.item = tuple(rows.shape[1:]), rows.element_size()
        self.code = CODES[str(rows.dtype).removeprefix("torch.")]

    def add(self, rows: Tensor) -> None:
        if tuple(rows.shape[1:]) != self.shape:
            raise ValueError(
                f"site {self.site!r} gave {self.shape[0]} positions per input at first and {rows.shape[1]} now: rows "
                f"of inputs that differ in length or size have no common array. Use {ONE_ROW}"
            )
        self.inputs += len(rows)
        with self.path.open("ab") as file:
            file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)

    def part(self) -> Part:
        return Part(self.site, self.code, (self.inputs, *self.shape), self.path.stat().st_size, self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        """The content; the temporary file is removed once it has been read, so that a disk holds one site twice."""
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece
        self.path.unlink()


def _run(
    network: Network,
    data: Any,
    max_rows: int | None,
    spools: dict[str, _Spool],
    path: Path,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """One pass over the data into temporary files; returns what the file says about its rows."""
    several = gives_several_rows(network.rows)
    with network.opened():
        stream = Stream.of(data, [network], max_rows)
        side = network.look(stream.first)
        mixing = network.mixing(stream.first)
        with Progress(f"extracting {network.name}", stream.expected, "inputs") as bar:
            for chunk in stream.chunks(block=None, largest=chunk_on_cpu([network], [side])):
                where = f"inputs {chunk.start} to {chunk.start + chunk.count - 1}"

                def keep(site: str, rows: Tensor, count: int = chunk.count, where: str = where) -> None:
                    numbers = _stored(rows, dtype, f"site {site!r} of {network.name}, {where}")
                    if (several and len(numbers) != count) or network.counts().get(site) is not None:
                        numbers = _by_input(numbers, count, network.counts().get(site), site)
                    if site not in spools:
                        # A name that is removed after a kill, as that of every temporary file.
                        spools[site] = _Spool(site, path.with_name(f"{path.name}.{len(spools)}"), numbers)
                    spools[site].add(numbers)

                network.read(chunk, keep)
                bar.advance(chunk.count)
        mixing = mixing or network.mixing_in_pass()
        return {
            "sites": list(side.sites),
            "rows": network.rule,
            "model": network.describe(),
            "max_rows": max_rows,
            "left_out": [list(pair) for pair in side.left_out],
            "mixing": mixing,
            "first_inputs": digest_of_first(stream.first),
        }


def _stored(rows: Tensor, dtype: torch.dtype | None, label: str) -> Tensor:
    """Rows on the CPU in the type of the file; raise if they are not finite, or not in that type."""
    numbers = rows.to("cpu", dtype or rows.dtype)
    if not bool(torch.isfinite(numbers).all()):
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"{label}: activations are NaN or infinite. Check the normalisation and the weights")
        most = float(rows.abs().max())
        raise ValueError(f"{label}: {most:.3g} is too large for {numbers.dtype}; use dtype='bfloat16' or 'float32'")
    return numbers


def _by_input(rows: Tensor, inputs: int, counts: Tensor | None, site: str) -> Tensor:
    """Rows of positions as (inputs, positions, features)."""
    if counts is not None and len(lengths := counts.unique()) > 1:
        raise ValueError(
            f"site {site!r} gives {int(lengths.min())} to {int(lengths.max())} positions per input, without padding: "
            f"they have no common array. Use {ONE_ROW}"
        )
    return rows.reshape(inputs, len(rows) // inputs, -1)
