"""Capture: from a model and data to activations, and from activations to rows."""

from ..checks import nearest
from .batches import (
    ALL,
    Batches,
    Chunk,
    Share,
    count_inputs,
    cut,
    input_rows,
    join,
    labels_of,
    model_arguments,
    named_arguments,
    number_array,
    recut,
    types_of,
    without_labels,
)
from .linear import NotLinear, check_linear, linearised, weighted_layers
from .restore import as_found, borrowed, kept_attributes, restored_after_errors
from .rows import (
    ONE_ROW,
    RULES,
    Rule,
    TokenMasks,
    check_rule,
    gives_several_rows,
    mask_of,
    rows_per_input,
    rule_name,
    to_rows,
)
from .saved import ACTIVATIONS, ACTIVATIONS_VERSION, ActivationFile, open_activations
from .sites import NoRows, SilentSite, Site, SiteError, Watch, answer_in, select, unwrap, watch
