"""SSD in Triton: parallel over segments of the sequences, chunk by chunk within a segment."""
