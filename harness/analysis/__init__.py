"""Commands that compare, profile and check trees, and tables of samples."""
