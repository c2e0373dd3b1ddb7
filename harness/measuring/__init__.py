"""Measuring a tree: supervised children, what they are asked, one run, and series of runs."""
