"""The pages of docs/results: functions that make their tables, and templates with their text."""
