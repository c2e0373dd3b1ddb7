"""The HTTP routes: each checks its request and runs a transaction."""
