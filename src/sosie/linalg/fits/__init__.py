"""Direct matching: affine maps from the features of one site to those of another, from their moments alone."""

from . import lasso, regression, rigid  # they fill FITS
from .define import FITS, Fit, find_fit, fit
from .joint import Affine, JointMoments, explained

__all__ = ["FITS", "Affine", "Fit", "JointMoments", "explained", "find_fit", "fit", "lasso", "regression", "rigid"]
