"""git, hardened: commands, remotes, clones, checkouts, and what its complaints mean."""
