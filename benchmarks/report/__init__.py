"""The pages of docs/results: what makes their tables, and templates with their words."""
