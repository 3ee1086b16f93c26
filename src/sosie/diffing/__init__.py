"""Is it still the same model, and if not, which layer is it?"""

from .diff import diff
