"""The part of Kimi Delta Attention that CUDA C++ computes: chunks before their state is known."""
