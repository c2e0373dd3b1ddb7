"""The routes: the order of their checks, and their transactions."""
