"""The tests that need a GPU, as a run of their own whose outcome is data."""
