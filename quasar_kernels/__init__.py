"""QuasarAttention: its reference, and the overlay that a fork receives."""
