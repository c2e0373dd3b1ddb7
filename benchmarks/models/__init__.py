"""Small models that are trained: their task, the ways to train them, and choices of branches."""
