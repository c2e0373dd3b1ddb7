"""The miner's commands and their flags."""
