"""What bounds the kernels, by Nsight Compute."""
