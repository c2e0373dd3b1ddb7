"""Gates that a model of blocks passes before anybody trains it: `python -m harness gates`."""
