"""The processes of the subnet: the miner daemon, the validator, its API."""
