"""The layer in the validator's loop and in training, beside the public fork and the peer."""
