"""The machine of a worker: its software, the state of its GPU, and the heat soak."""
