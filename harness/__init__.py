"""The measuring harness: the loop that a validator times, run here first."""
