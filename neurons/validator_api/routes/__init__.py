"""The routes: what is checked in which order, and what is written in one transaction."""
