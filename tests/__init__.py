"""The tests: their folders are those of the code that they test."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
