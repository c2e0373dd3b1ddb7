"""The CUDA kernels below NVIDIA's compute-sanitizer."""
