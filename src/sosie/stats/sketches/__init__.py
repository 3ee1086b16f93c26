"""Sketches of features and gradients: mergeable, of a size that the data do not change."""

from .hashes import Buckets, Drawn, Resketch, check_seed
from .kernels import KERNELS, Kernel, mean_squared, product_gram
from .making import SiteForm, SiteMaker, plan_forms
from .pair import SketchPair
from .pairing import Takes
from .site import Pairs, Part, SiteSketch
from .sketch import NotShared, Sketch, Spans, parts_of
from .tensor_sketch import TensorSketch

__all__ = [
    "KERNELS",
    "Buckets",
    "Drawn",
    "Kernel",
    "NotShared",
    "Pairs",
    "Part",
    "Resketch",
    "SiteForm",
    "SiteMaker",
    "SiteSketch",
    "Sketch",
    "SketchPair",
    "Spans",
    "Takes",
    "TensorSketch",
    "check_seed",
    "mean_squared",
    "parts_of",
    "plan_forms",
    "product_gram",
]
