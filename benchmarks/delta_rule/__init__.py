"""The delta rule for model builders, with a decay and without, beside the host library's."""
