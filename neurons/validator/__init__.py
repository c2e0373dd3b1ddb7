"""The validator: sandbox, import check, timing, verdict and weights of one submission at a time."""
