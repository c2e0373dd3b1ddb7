"""The process that holds the code under test: it loads a tree, calls it and times it."""
