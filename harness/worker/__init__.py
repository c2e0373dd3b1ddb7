"""The child process that measures: a referee, and a subject that runs the code under test."""
