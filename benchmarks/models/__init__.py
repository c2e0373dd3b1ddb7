"""Small models that are trained: their task, and the ways to train them."""
