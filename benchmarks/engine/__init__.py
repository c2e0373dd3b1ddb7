"""What all measurements share: clocks, processes, the comparison with float64, limits, results."""
