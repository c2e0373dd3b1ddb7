"""The validator API: registration, submissions, rounds, ranking and bans over HTTP."""
