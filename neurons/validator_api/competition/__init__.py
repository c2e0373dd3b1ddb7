"""The competition: submissions, rounds, ranking, bans, and the public lists of these."""
