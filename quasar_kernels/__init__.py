"""QuasarAttention: reference implementation, kernels, and blocks for models."""

__version__ = "0.3.0"
"""The version of the distribution `quasar-kernels`, which the library and the miner share."""
