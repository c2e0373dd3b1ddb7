"""Measurements: their cases, commands, data models and pages, one folder per subject."""
