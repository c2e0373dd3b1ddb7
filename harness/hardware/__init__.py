"""Descriptions of the measuring machine, and the hardware bounds of GPUs."""
