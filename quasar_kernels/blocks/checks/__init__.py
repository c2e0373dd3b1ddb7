"""Checks of a model of blocks before anybody trains it: `python -m harness gates`."""
