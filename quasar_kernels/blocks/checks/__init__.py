"""Checks of a model of blocks before its training: `python -m harness gates`."""
