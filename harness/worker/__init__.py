"""The child process: it imports torch and the code under test, and outlives neither."""
