"""The tables of docs/benchmarks.md that are made of what the layer's commands found."""
