"""Models that learn to recall: how the layer trains, compiled, checkpointed and on several GPUs."""
