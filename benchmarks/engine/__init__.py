"""Shared parts of all measurements: clocks, processes, comparison with float64, limits, results."""
