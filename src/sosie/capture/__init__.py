"""Capture: from a model and data to activations, and from activations to rows."""

from ..checks import nearest
from .batches import (
    ALL,
    Batches,
    Chunk,
    Share,
    copied,
    count_inputs,
    cut,
    explain_images,
    explain_types,
    input_rows,
    join,
    labels_of,
    model_arguments,
    named_arguments,
    number_array,
    recut,
    types_of,
    unread_mask,
    without_labels,
)
from .linear import LinearRun, NotLinear, check_linear, linearised, weighted_layers
from .restore import as_found, borrowed, kept_attributes, restored_after_errors
from .rows import (
    RULES,
    Masks,
    Rule,
    check_rule,
    gives_several_rows,
    mask_of,
    needs_axes,
    rows_per_input,
    rule_name,
    to_rows,
)
from .saved import (
    ACTIVATIONS,
    ACTIVATIONS_VERSION,
    ActivationFile,
    open_activations,
    read_npz,
    read_safetensors,
)
from .sites import (
    Keep,
    NoRows,
    SilentSite,
    Site,
    SiteError,
    Watch,
    answer_in,
    fresh_leaf,
    select,
    unshared,
    unwrap,
    watch,
)
