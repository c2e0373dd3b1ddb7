"""The subnet's processes (miner, validator, validator API, inference server) and shared code."""
