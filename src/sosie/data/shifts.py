"""Changes to inputs under which models can be compared: attacks, noise and corruptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..checks import check_options, nearest, one_of, parse_call, whole_number
from ..process_state import held, kept_random_state
from .corruptions import CORRUPTIONS, DEFAULT, Corruption
from .draws import in_sphere, normals, uniforms

Norm = Literal["inf", "2"]
Keep = Callable[[Tensor], Tensor]
EPSILON: dict[str, float] = {"inf": 8 / 255, "2": 0.5}  # usual values for images in [0, 1]
TRADES_START = 1e-3  # standard deviation of the random start, since the divergence at x itself has no gradient


@dataclass(frozen=True)
class Attack:
    """A change of inputs; called on a model, inputs and labels.

    `kind`: "fgsm" (Goodfellow et al. 2014) goes ε along the sign of the gradient; "fast_fgsm" (Wong et al. 2020)
    starts at random in the ball, goes 1.25 ε and is projected back; "pgd" (Madry et al. 2017) takes `steps`; "trades"
    (Zhang et al. 2019) takes steps that raise KL(model(x) ‖ model(x′)), without labels; "gaussian" is noise of standard
    deviation `epsilon`, not an attack, without ball or box. `norm`: of the ball of radius `epsilon` (None: 8/255 for
    "inf", 0.5 for "2", 0.1 for noise). `step_size` None: ε, 1.25 ε, or 2.5 ε / steps. `bounds`: the box of valid
    inputs, or None.
    """

    kind: str
    epsilon: float | None = None
    steps: int | None = None
    step_size: float | None = None
    norm: Norm = "inf"
    random_start: bool | None = None
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.kind not in _ATTACK_NAMES:
            raise ValueError(f"no attack is called {self.kind!r}{nearest(str(self.kind), _ATTACK_NAMES)}")
        object.__setattr__(self, "norm", one_of(str(self.norm), "norm", EPSILON))
        for name in ("epsilon", "step_size"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if self.steps is not None and whole_number(self.steps, "steps", least=1) > 1 and not self._is_iterated:
            raise ValueError(f"{self.kind} takes one step; 'pgd' takes {self.steps}")
        if self.kind == "trades" and self.random_start is False:
            raise ValueError("trades must start at random: at x itself KL(model(x) ‖ model(x′)) has no gradient")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds are (low, high), got {self.bounds}")

    @property
    def _is_iterated(self) -> bool:
        return self.kind in ("pgd", "trades")

    @property
    def radius(self) -> float:
        if self.epsilon is not None:
            return self.epsilon
        return 0.1 if self.kind == "gaussian" else EPSILON[self.norm]

    @property
    def count(self) -> int:
        return self.steps or (10 if self._is_iterated else 1)

    @property
    def stride(self) -> float:
        if self.step_size is not None:
            return self.step_size
        return {"fgsm": 1.0, "fast_fgsm": 1.25}.get(self.kind, 2.5 / self.count) * self.radius

    @property
    def needs_labels(self) -> bool:
        return self.kind in ("fgsm", "fast_fgsm", "pgd")

    def __str__(self) -> str:
        options = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "kind"]
        text = ", ".join(f"{name}={value!r}" for name, value in options if value != getattr(ATTACKS[self.kind], name))
        return f"{self.kind}({text})" if text else self.kind

    def __call__(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor | None = None,
        *,
        seed: int | Tensor = 0,
        index: Tensor | None = None,
    ) -> Tensor:
        """Return the changed inputs (see `attack`).

        `index` (n,) numbers the inputs and determines the random start together with the seed; it is (m, n) if `model`
        stands for m networks, whose output for inputs (m, n, …) is (m, n, classes).
        """
        index = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
        self._check_inputs(x, y if self.needs_labels else None, index)
        with _as_found(model), torch.inference_mode(False), torch.enable_grad():
            clean = x.detach().clone()  # may not be an inference tensor, and the model may work in place
            if self.kind == "gaussian":
                return clean + self.radius * self._noise(normals, clean, seed, index)
            target = self._target(model, clean, y)
            keep = self._keep(clean, index.ndim)
            changed = self._start(clean, seed, index, keep)
            for _ in range(self.count):
                changed = keep(self._direction(model, changed, target).mul_(self.stride).add_(changed))
            return changed

    def _check_inputs(self, x: Tensor, y: Tensor | None, index: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"attacks need floating-point inputs, got {x.dtype}; divide uint8 images by 255")
        if x.shape[: index.ndim] != index.shape:
            raise ValueError(f"need one number per input: inputs {tuple(x.shape)}, numbers {tuple(index.shape)}")
        if y is not None and (y.is_floating_point() or y.is_complex()):
            raise TypeError(f"labels are whole numbers, got {y.dtype}")
        if y is not None and y.shape != index.shape:
            raise ValueError(f"need one label per input: inputs {tuple(x.shape)}, labels {tuple(y.shape)}")
        if self.bounds is not None and self.kind != "gaussian" and x.numel():
            low, high = (float(edge) for edge in torch.aminmax(x.detach()))
            if not (low >= self.bounds[0] and high <= self.bounds[1]):  # also where they are NaN
                raise ValueError(
                    f"inputs lie in [{low:.4g}, {high:.4g}], outside bounds={self.bounds}: normalise inside the model, "
                    "or give bounds=, or bounds=None"
                )

    def _target(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return the labels, or for TRADES the probabilities of the clean inputs."""
        if self.needs_labels and y is not None:
            return y.to(x.device, torch.int64)
        with torch.no_grad():
            logits = model(x.clone())
        return logits.argmax(-1) if self.needs_labels else logits.softmax(-1)

    def _start(self, x: Tensor, seed: int | Tensor, index: Tensor, keep: Keep) -> Tensor:
        if self.kind == "trades":
            return keep(self._noise(normals, x, seed, index).mul_(TRADES_START).add_(x))
        if not (self.kind in ("fast_fgsm", "pgd") if self.random_start is None else self.random_start):
            return x
        if self.norm == "2":
            return keep(self._noise(in_sphere, x, seed, index).mul_(self.radius).add_(x))
        return keep(self._noise(uniforms, x, seed, index).sub_(0.5).mul_(2 * self.radius).add_(x))

    @staticmethod
    def _noise(draw: Callable[..., Tensor], x: Tensor, seed: int | Tensor, index: Tensor) -> Tensor:
        return draw(seed, index, math.prod(x.shape[index.ndim :]), x.dtype).reshape(x.shape)

    def _direction(self, model: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
        """Return the direction of steepest ascent, of length 1 in the norm; 0 where the gradient is 0."""
        x = x.detach().requires_grad_()
        scores = model(x.clone()).log_softmax(-1)
        if self.needs_labels:
            loss = -scores.gather(-1, target[..., None]).sum()
        else:
            loss = torch.nn.functional.kl_div(scores, target, reduction="sum")  # KL(target ‖ scores)
        (gradient,) = torch.autograd.grad(loss, x)
        if self.norm == "inf":
            return gradient.sign_()
        length = _lengths(gradient, target.ndim if self.needs_labels else target.ndim - 1)
        return torch.where(length > 0, gradient / length, torch.zeros_like(gradient))

    def _keep(self, x: Tensor, lead: int) -> Keep:
        """Return a function that projects changed inputs to the ball around x and to the box, in place."""
        low, high = (-float("inf"), float("inf")) if self.bounds is None else self.bounds
        if self.norm == "inf":
            lows, highs = (x - self.radius).clamp_(min=low), (x + self.radius).clamp_(max=high)
            return lambda changed: torch.clamp_(changed, lows, highs)

        def keep(changed: Tensor) -> Tensor:
            change = changed - x
            length = _lengths(change, lead)
            inside = torch.where(length > self.radius, x + change * (self.radius / length), changed)
            return inside.clamp_(low, high)  # stays in the ball, since x lies in the box

        return keep


_ATTACK_NAMES = ("fgsm", "fast_fgsm", "pgd", "trades", "gaussian")
ATTACKS: dict[str, Attack] = {kind: Attack(kind) for kind in _ATTACK_NAMES}


def attack(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None = None,
    kind: str | Attack = "pgd",
    *,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """Change inputs x to mislead a model that returns logits (n, classes); returns a new tensor.

    For `kind` and the options (epsilon, steps, step_size, norm, random_start, bounds) see `Attack`. `y` are labels
    (n,); None takes the model's own predictions. A module runs in evaluation mode and is restored afterwards. Random
    numbers depend only on the seed and the position of the input.
    """
    return replace(open_attack(kind), **options)(model, x, y, seed=seed)


def open_attack(attack: str | Attack) -> Attack:
    """Return the attack that a text such as "pgd" or "pgd(epsilon=0.1, steps=20)" names."""
    if isinstance(attack, Attack):
        return attack
    kind, options = parse_call(attack)
    known = [field.name for field in fields(Attack) if field.name != "kind"]
    check_options(options, known, kind)
    return Attack(kind, **options)


def _lengths(x: Tensor, lead: int) -> Tensor:
    """Return Euclidean lengths, one per input, in a shape to divide by."""
    return x.flatten(lead).norm(dim=-1).reshape(*x.shape[:lead], *[1] * (x.ndim - lead))


@contextmanager
def _as_found(model: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put the model into evaluation mode; restore its flags and the random state afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with held(modules), kept_random_state():
        flags = [module.training for module in modules]
        try:
            if isinstance(model, nn.Module):
                model.eval()
            yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag


# Shifts by name

CLEAN = "clean"


@dataclass(frozen=True)
class Shift:
    """A change to inputs before the models see them: a corruption, an attack, or none."""

    label: str
    corruption: Corruption | None = None
    severity: int = DEFAULT
    attack: Attack | None = None
    seed: int = 0

    @property
    def is_against_a_model(self) -> bool:
        """Whether the changed inputs depend on the attacked model."""
        return self.attack is not None and self.attack.kind != "gaussian"

    def of_any_model(self, images: Tensor, *, index: Tensor) -> Tensor:
        """Return the changed images of a shift that depends on no model."""
        if self.corruption is not None:
            return self.corruption(images, severity=self.severity, seed=self.seed, index=index)
        return images if self.attack is None else self.attack(lambda x: x, images, seed=self.seed, index=index)


def open_shift(text: str, seed: int = 0) -> Shift:
    """Return the shift that a text names: "clean", "fog", "fog(severity=5)", "pgd(epsilon=0.1)" or "gaussian"."""
    name, options = parse_call(text)
    if name in ATTACKS:
        return Shift(text.strip(), attack=open_attack(text), seed=seed)
    if name == CLEAN and not options:
        return Shift(CLEAN)
    known = [CLEAN, *CORRUPTIONS, *ATTACKS]
    if name not in known:
        raise ValueError(f"no shift is called {name!r}{nearest(name, known)}")
    if wrong := [option for option in options if option != "severity" or name == CLEAN]:
        raise ValueError(f"{text!r}: no option {wrong[0]!r}; a corruption takes severity, 'clean' takes none")
    severity = whole_number(options.get("severity", DEFAULT), f"{name}: severity", least=1, most=5)
    return Shift(text.strip(), CORRUPTIONS[name], severity, seed=seed)


def open_shifts(shifts: str | Sequence[str] | Sequence[Shift], seed: int = 0) -> tuple[Shift, ...]:
    """Return the shifts that texts name, in order; "corruptions" and "attacks" stand for all of these.

    `seed` determines what is random in them. Shifts that are open already stay as they are.
    """
    groups = {"corruptions": list(CORRUPTIONS), "attacks": list(ATTACKS)}
    opened: list[Shift] = []
    for shift in [shifts] if isinstance(shifts, str) else shifts:
        names = [shift] if isinstance(shift, Shift) else groups.get(shift, [shift])
        opened += [name if isinstance(name, Shift) else open_shift(name, seed) for name in names]
    labels = [shift.label for shift in opened]
    if not opened:
        raise ValueError("no shifts given: name 'clean', a corruption or an attack")
    if repeated := [label for k, label in enumerate(labels) if label in labels[:k]]:
        raise ValueError(f"the shift {repeated[0]!r} is given twice")
    return tuple(opened)
