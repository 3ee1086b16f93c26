"""What cannot be a penalty, told before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...measures import MEASURES, Measure
from .likeness import least_rows

Target = nn.Module | Mapping[str, Tensor]


def check_models(models: Sequence[nn.Module], target: Target | None) -> None:
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError("Penalty needs a torch.nn.Module, or a list of them")
    if len({id(model) for model in models}) < len(models):
        raise ValueError("one model is given twice: members of an ensemble are models of their own")
    if target is not None and len(models) > 1:
        raise ValueError(f"target= is for one model, got {len(models)}: make a penalty for each")
    if target is not None and any(target is model for model in models):
        raise ValueError("the target is the model itself: give a copy (copy.deepcopy) to stay close to what it is now")
    if target is not None and not isinstance(target, (nn.Module, Mapping)):
        raise TypeError(f"target is a model or {{site: activation}}, got {type(target).__name__}")


def check_measure(measure: Measure, rows: int | None, *, alone: bool, towards: bool) -> None:
    if not measure.differentiable or measure.needs:
        others = ["linear_cka", "debiased_cka", "mean_cca", "procrustes_distance"]
        if measure.reads_weights:
            others = [m.name for m in MEASURES.values() if m.differentiable and m.reads is measure.reads][:4] or others
        why = "is not differentiable" if not measure.differentiable else f"needs {', '.join(measure.needs)}"
        raise ValueError(f"{measure.name} {why}, so it cannot be trained with; take {', '.join(others)}")
    if towards and measure.closer == "up" and measure.bounds[1] is None:
        raise ValueError(
            f"{measure.name} has no largest value, so that no model is ever close to a target; take mean_cca"
        )
    if measure.reads_weights:
        if alone:
            raise ValueError(f"{measure.name} compares the weights of models: give several, or target=")
    elif rows is not None and rows < least_rows(measure):
        least = least_rows(measure)
        raise ValueError(f"{measure.name} of {rows} rows is always the same: it needs {least} at least")
