"""The pages of docs/results: a module's `documents` fills a template, and returns texts by path."""
