"""The layer on a GPU: what surrounds the operator, its gradients, and replay as CUDA graphs."""
