"""The validator API as a miner uses it: the calls, what is signed, what its public lists show."""
