"""The steps of the cycle: prepare (three steps), commit and reveal, or submit, then follow."""
