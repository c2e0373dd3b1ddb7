"""The mining daemon: journal, state machine, fork, client and the steps between them."""
