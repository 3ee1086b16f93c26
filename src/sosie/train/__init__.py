"""Training, as far as comparing models needs it."""

from .loop import Training, accuracy, fit
from .many_networks import Checkpoint, fit_side_by_side, fit_together
from .penalties import Attached, Decorrelation, Penalty, decorrelation
from .recipe import Augment, Recipe
from .sparse import Masks, Regrow, pruned_masks, random_masks
from .tokens import TokenPenalty, calibrate_tokens

__all__ = [
    "Attached",
    "Augment",
    "Checkpoint",
    "Decorrelation",
    "Masks",
    "Penalty",
    "Recipe",
    "Regrow",
    "TokenPenalty",
    "Training",
    "accuracy",
    "calibrate_tokens",
    "decorrelation",
    "fit",
    "fit_side_by_side",
    "fit_together",
    "pruned_masks",
    "random_masks",
]
