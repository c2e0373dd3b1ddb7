"""The machine that measures: what it says of itself, and what no kernel exceeds on its GPU."""
