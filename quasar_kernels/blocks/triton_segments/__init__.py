"""Shared parts of the Triton kernels of WKV6 and SSD: segments, rows of heads, the scan."""
