"""Faster kernels for this machine: who proposes them, what they must pass, and when."""
