"""The miner: `python -m neurons.miner` publishes, measures, claims, commits and reveals."""
