"""Shared by the Triton kernels of WKV6 and SSD: segments, rows of heads, and the scan."""
