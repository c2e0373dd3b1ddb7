"""The Triton kernels of Kimi Delta Attention: forward and backward passes of whole sequences."""
