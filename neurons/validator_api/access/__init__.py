"""Who may call, from where, how often and with how much."""
