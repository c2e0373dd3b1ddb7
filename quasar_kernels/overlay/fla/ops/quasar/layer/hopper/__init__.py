"""The layer in fused kernels for Hopper GPUs: projection, operator, gated output."""
