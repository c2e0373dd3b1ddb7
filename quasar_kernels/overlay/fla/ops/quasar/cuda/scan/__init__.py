"""The segmented scan in CUDA C++: host code, and its kernels in csrc."""
