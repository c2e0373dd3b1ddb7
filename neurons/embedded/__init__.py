"""A whole subnet on this machine, which the miner uses without a .env."""
