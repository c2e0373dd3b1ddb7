"""Measuring a tree: supervised workers, their jobs, one sample, and plans of samples."""
