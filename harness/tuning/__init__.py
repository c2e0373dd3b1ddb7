"""The search over the tile sizes of the operator in Triton: candidates, checks and the result."""
