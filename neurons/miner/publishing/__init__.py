"""The fork that carries the kernels: the overlay in it, and GitHub."""
