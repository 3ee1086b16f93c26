"""Is a measure any good? Calibration, grounding in what models do, and resistance to manipulation."""
