"""What the Triton kernels of WKV6 and SSD share: segments of sequences, rows of heads, the scan."""
