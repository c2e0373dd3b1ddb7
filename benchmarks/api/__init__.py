"""How much the validator API takes: rates, slow clients, kill -9 under load."""
