"""The default without a .env: a whole subnet on this machine."""
