"""The competition itself: submissions, rounds, ranking, bans, and what of them anyone may see."""
