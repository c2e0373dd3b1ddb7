"""The miner's inference server: the reference model, greedy decoding, and the logits of a step."""
