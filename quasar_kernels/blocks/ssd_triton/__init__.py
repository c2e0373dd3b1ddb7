"""SSD in Triton: segments of the sequences side by side, chunks of a segment one by one."""
