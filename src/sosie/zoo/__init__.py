"""Many models: fingerprints of them, kept and searched."""
