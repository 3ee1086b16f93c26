"""Whether two models are the same, entry by entry, and if not, which layer makes the error."""
