"""Hardened git: commands, remotes, clones, checkouts, and the meaning of error messages."""
