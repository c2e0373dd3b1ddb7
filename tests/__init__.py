"""The tests, in the folder structure of the code."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
