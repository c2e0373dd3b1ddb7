"""The tests, in the folder structure of the code."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent

AWKWARD = "a #1 ?mode=memory&x=1 %20 {b} 'c'"
"""A folder's name with each character that addresses, formats and shells treat specially."""
