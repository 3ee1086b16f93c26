"""Write docs/reference.md: the public names with their signatures and docstrings, and the command line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from as_markdown import plain, prose, table

import sosie

PATH = Path(__file__).parent / "reference.md"
WIDTH = 100  # columns a signature may take before each argument gets a line of its own

INTRODUCTION = """# Reference

Made by `make docs` from the docstrings. `import sosie` has the names of the first section; the others are imported from
where they live.
"""

# What a user meets beside the door; every name of the door itself is listed by itself.
BESIDE = {
    "sosie.results": (
        *("Result", "Comparison", "Comparisons", "Estimate", "Side", "Caveat", "Leaderboard", "Entry", "Costs", "Cost"),
        *("Dynamics", "Order"),
    ),
    "sosie.sketching": (
        *("Sketch", "classify", "Classifiers", "task2vec", "Task2Vec", "fisher_rao_norm", "FisherRao"),
    ),
    "sosie.benchmark": ("run_benchmark", "Scale", "cost", "linear_probe"),
    "sosie.measures": ("Measure", "find", "define", "crossnobis", "noise_mahalanobis"),
    "sosie.shapes": ("mean_shape", "MeanShape", "geodesic", "tangent_pca", "kmeans", "medoids", "spherical_mds"),
    "sosie.models": ("open_model", "list_models", "NamedModel", "with_dynamic_tokens"),
    "sosie.data": ("open_data", "open_images", "list_data", "DataPart", "corrupt", "attack", "Attack"),
    "sosie.data.shifts": ("open_shifts",),
    "sosie.engine": ("single_process",),
    "sosie.train": (
        "fit",
        "Recipe",
        "Training",
        "Augment",
        "fit_side_by_side",
        "fit_together",
        "Checkpoint",
        "accuracy",
        "decorrelation",
        "Decorrelation",
        "Attached",
        "Penalty",
        "Masks",
        "random_masks",
        "pruned_masks",
        "Regrow",
        "TokenPenalty",
        "calibrate_tokens",
    ),
    "sosie.train.sparse": (
        "load_masked",
        "sparse_cost",
        "SparseCost",
        "epsilon_sparsity",
        "weight_histogram",
        "WeightHistograms",
    ),
    "sosie.train.continual": ("learn_tasks", "Continual", "ensemble"),
    "sosie.train.heads": ("refit_head", "Heads", "features"),
    "sosie.rsa": ("RDMs", "compare_rdms", "Model", "evaluate", "Evaluation", "noise_ceiling"),
    "sosie.history": ("Recorder", "lightning_callback", "hf_callback"),
    "sosie.train.federated": (
        *("Clients", "split_classes", "split_tasks", "simulate", "Federated", "ensemble_accuracy", "Method", "Phase"),
    ),
    "sosie.linalg": ("cluster", "most_similar", "adjusted_rand_index"),
    "sosie.report": ("write_plots", "plot_heatmap", "plot_curves"),
}


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## sosie\n", *(_entry("sosie", name, getattr(sosie, name)) for name in sosie.__all__)]
    for module, names in BESIDE.items():
        parts.append(f"## {module}\n")
        parts += [_entry(module, name, getattr(import_module(module), name)) for name in names]
    parts += ["## Command line\n", "`sosie VERB --help` says the same in a terminal.\n", *_verbs()]
    return "\n".join(parts)


def _entry(module: str, name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return f"### {module}.{name}\n\n{_code(_signature(name, thing))}\n\n{prose(inspect.getdoc(thing))}"
    parts = [f"### {module}.{name}\n", prose(inspect.getdoc(thing))]
    if dataclasses.is_dataclass(thing):
        fields = [f for f in dataclasses.fields(thing) if not f.name.startswith("_")]
        parts.append(_code("\n".join(f"{field.name}: {_annotation(field.type)}" for field in fields)) + "\n")
    for member, found in vars(thing).items():
        if member.startswith("_") or not _documented(found):
            continue
        if isinstance(found, property):
            kind = _annotation(inspect.signature(found.fget).return_annotation)
            parts.append(f"**`.{member}: {kind}`**  \n{prose(found.__doc__)}")
        else:
            function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
            parts.append(f"**`.{_signature(member, function, method=True)}`**  \n{prose(function.__doc__)}")
    return "\n".join(parts)


def _documented(found: Any) -> bool:
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    return isinstance(found, property) or (inspect.isfunction(function) and bool(function.__doc__))


def _signature(name: str, function: Any, *, method: bool = False) -> str:
    signature = inspect.signature(function)
    arguments = _arguments(list(signature.parameters.values())[1 if method else 0 :])
    returns = "" if signature.return_annotation is inspect.Signature.empty else signature.return_annotation
    end = f" -> {_annotation(returns)}" if returns else ""
    line = f"{name}({', '.join(arguments)}){end}"
    if method or len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){end}"])


def _arguments(parameters: list[inspect.Parameter]) -> list[str]:
    found: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            found.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        typed = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        found.append(f"{stars}{parameter.name}{typed}{default}")
    return found


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _verbs() -> list[str]:
    from typer.main import get_command

    from sosie.cli.main import app

    return list(_described(get_command(app)))


def _described(group: Any, above: str = "sosie") -> Iterator[str]:
    from sosie.cli.help import split_help

    for name, command in group.commands.items():
        sentence, examples, texts = split_help(command.help)
        parts = [f"### {above} {name}", plain(sentence), _code("\n".join(examples)), *map(plain, texts)]
        yield "\n\n".join(parts) + "\n"
        if hasattr(command, "commands"):
            yield from _described(command, f"{above} {name}")
        else:
            yield table(("", "", "default"), map(_parameter, _options(command)))


def _options(command: Any) -> list[Any]:
    from sosie.cli.options import GROUPS

    options = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    return sorted(options, key=lambda each: [*GROUPS, each.rich_help_panel].index(each.rich_help_panel))


def _parameter(parameter: Any) -> tuple[str, str, str]:
    from sosie.cli.help import default_of, term

    default = default_of(parameter)
    return f"`{term(parameter)}`", plain(parameter.help), f"`{default}`" if default else ""
