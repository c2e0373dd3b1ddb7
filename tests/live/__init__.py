"""Judges this miner against the public subnet's own code on loopback; README.md says how."""
