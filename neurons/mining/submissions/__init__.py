"""A submission's life as a state machine, and the journal that remembers every one of them."""
