"""Training, as far as comparing models needs it."""

from .loop import Training, accuracy, fit
from .penalties import Decorrelation, Penalty, decorrelation
from .recipe import Augment, Recipe
from .side_by_side import fit_side_by_side
from .sparse.making import Regrow, pruned_masks, random_masks
from .sparse.masks import Masks
from .taps import Attached
from .together import Checkpoint, fit_together
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
