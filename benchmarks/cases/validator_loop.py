"""A validator's timing loop, written from the subnet's description without the harness's code.

    python validator_loop.py TREE TOKENS

It prints `ready` after importing the layer, waits for a line on stdin, runs the loop and prints
tokens/s.
"""

from __future__ import annotations

import sys
import time


def main() -> None:
    """Import the layer from the tree, wait, run the loop, print the speed."""
    tree, tokens = sys.argv[1], int(sys.argv[2])
    sys.path.insert(0, tree)
    import torch
    from fla.layers.quasar import QuasarAttention

    print("ready", flush=True)
    sys.stdin.readline()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    layer = QuasarAttention(
        hidden_size=512, head_dim=64, num_heads=8, mode="chunk", use_short_conv=True
    ).to(device)
    x = torch.randn(1, tokens, 512, device=device)
    with torch.set_grad_enabled(gpu), torch.autocast("cuda", torch.bfloat16, enabled=gpu):
        for _ in range(3):
            layer(x)
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            layer(x)
        if gpu:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    print(10 * tokens / elapsed, flush=True)


if __name__ == "__main__":
    main()
