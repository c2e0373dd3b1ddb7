"""The segmented scan in Triton: its kernels, how they are cut up, tuned and launched."""
