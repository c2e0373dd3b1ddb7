"""`python -m neurons.inference_server.sample FOLDER`: makes a small Qwen2 of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quasar_kernels.arguments import Parser

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
"""The model's sizes, as arguments of Qwen2Config."""
SPREAD = 0.15
"""Standard deviation of the weights, with which logits differ as much as a trained model's."""


def make_model(folder: Path) -> None:
    """Write the model to `folder`; its weights are always the same."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(1)
    config = Qwen2Config(**SMALL)
    loader: Any = AutoModelForCausalLM  # some versions of transformers type it, others not
    model = loader.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, SPREAD)
        model.lm_head.weight.mul_(4.0)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = Parser(description="Make a small Qwen2 of random weights.")
    parser.add_argument("folder", type=Path, help="where its files are written")
    make_model(parser.parse_args().folder)
