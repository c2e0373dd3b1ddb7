"""Publishes the kernels: the fork, the overlay in it, and GitHub's API."""
