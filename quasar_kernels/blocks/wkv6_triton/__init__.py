"""WKV6 in Triton: segments of the sequences in parallel, chunks of a segment one by one."""
