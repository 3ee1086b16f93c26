"""How like a reference a network still is, measured while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..capture import Rule
from ..checks import whole_number
from ..engine import compare
from ..engine.distributed import single_process
from ..engine.network import open_network
from ..measures import Measure
from ..results import Comparison
from .recorder import RunInputs

MAX_ROWS = 1024


class Monitor:
    """Compares a model with a reference at each step: `monitor.record(step)` in any loop.

    `fit(…, after_epoch=monitor.record)`, `lightning_callback(monitor)` and `hf_callback(monitor)` take it in place of a
    recorder. `model` is the module that is trained, `reference` any other model (`copy.deepcopy(model)`: the start),
    `data` what both are run on, the first `max_rows` inputs, read once. `measures`, `sites`, `rows`, `prepare`,
    `inputs` and `names` (of the model and of the reference) are as for `compare`. Every `every`-th step is compared;
    `log` is a writer for `Comparison.log`, or a function of (comparison, step). `comparisons` holds them all by step.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Any,
        data: Any,
        *,
        measures: str | Measure | Sequence[str | Measure] = "debiased_cka",
        sites: Any = None,
        rows: Rule = "flatten",
        every: int = 1,
        log: Any = None,
        max_rows: int | None = MAX_ROWS,
        prepare: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"a monitor runs a torch.nn.Module, got {type(model).__name__}")
        if reference is model:
            raise ValueError("the reference is the model itself, which changes with it: copy.deepcopy(model) keeps it")
        self.model, self.reference, self.log = model, reference, log
        self.every = whole_number(every, "every", least=1)
        self.comparisons: dict[int, Comparison] = {}
        probe = RunInputs(data, rows, prepare=prepare, inputs=inputs, max_rows=max_rows)
        probe.shapes(model, sites)  # raises now, not in the middle of the training
        self._data = probe.batches  # read once: a loader may shuffle
        other = open_network(reference, sites=sites, rows=rows, prepare=prepare, inputs=inputs, device=None)
        with other.opened():
            other.look(self._data[0])
        self._options = {"measures": measures, "sites": sites, "rows": rows, "prepare_a": prepare, "prepare_b": prepare}
        self._options |= {"inputs": inputs, "names": names}

    @property
    def steps(self) -> list[int]:
        """The steps that were compared."""
        return list(self.comparisons)

    def record(self, step: int) -> None:
        """Compare the model as it is now; a step that `every` leaves out costs nothing."""
        if whole_number(step, "step", least=0) % self.every:
            return
        with single_process():  # in training on several devices, only the first process is here
            result = compare(self.model, self.reference, self._data, **self._options)
        assert isinstance(result, Comparison)
        self.comparisons[step] = result
        if callable(self.log) and not hasattr(self.log, "log"):
            self.log(result, step)
        elif self.log is not None:
            result.log(self.log, step)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all comparisons with their step."""
        return [{"step": step, **row} for step, result in self.comparisons.items() for row in result.rows()]

    def resume(self, step: int) -> list[int]:
        """Forget later steps, for a run that goes back to a checkpoint; returns those. At step 0 a run starts anew."""
        later = [known for known in self.comparisons if known > step or step <= 0]
        for known in later:
            del self.comparisons[known]
        return later

    def close(self) -> None:
        """Nothing to close: a monitor can be used where a recorder can."""

    def __repr__(self) -> str:
        return f"<Monitor of {type(self.model).__name__}: {len(self.comparisons)} steps>"
