"""The search over the tiles of the operator in Triton: what it tries, keeps and takes."""
