"""The validator API: HTTP routes over a database."""
