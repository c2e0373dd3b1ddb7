"""The machine that measures, and the bounds of its GPU."""
