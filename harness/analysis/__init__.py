"""A command that compares trees, its statistics, and tables of samples."""
