"""A language model of hybrid blocks, whose input and output share an embedding."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quasar_kernels.blocks import Backend, BlockState, HybridBlock
from quasar_kernels.blocks.language.settings import Sizes as Sizes


class LanguageModel(nn.Module):
    """Predicts the next token.

    Raises:
        ValueError: sizes for which `HybridBlock` raises it.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, sizes.vocabulary
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        options = sizes._asdict()
        del options["vocabulary"]
        self.blocks = nn.ModuleList(HybridBlock(layer=n, **options) for n in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self, tokens: Tensor, places: Tensor | None = None, cp_context: Any = None
    ) -> Tensor:
        """Return logits `[B, T, vocabulary]` after tokens `[B, T]`, or only at places `[B, P]`.

        With a `cp_context`, the tokens are this rank's slice of packed sequences (B = 1).
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, cp_context=cp_context)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(x), self.embedding.weight)

    def continued(
        self, tokens: Tensor, states: list[BlockState] | None = None, cp_context: Any = None
    ) -> tuple[Tensor, list[BlockState]]:
        """Continue from the states of an earlier call, which this call may overwrite.

        Args:
            tokens: `[B, T]`, one or more.
            states: the result of an earlier call; None starts from zero states.
            cp_context: the tokens are this rank's slice of one sequence, which starts from zero
                states. To continue the sequence, use the states of the last rank.

        Returns:
            logits `[B, T, vocabulary]` and the states after the tokens.
        """
        x, new_states = self.embedding(tokens), []
        for n, block in enumerate(self.blocks):
            last = None if states is None else states[n]
            x, state = block(x, last, keep=True, cp_context=cp_context)
            new_states.append(state)
        return F.linear(self.norm(x), self.embedding.weight), new_states

    def backends(self, dtype: torch.dtype | None = None) -> dict[str, Backend]:
        """Return each branch's backend, with the reason; it is the same in all blocks."""
        return cast(HybridBlock, self.blocks[0]).backends(dtype)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits `[B, T, V]` for the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def sampled(
    model: LanguageModel, prompt: Tensor, count: int, temperature: float, seed: int
) -> Tensor:
    """Sample `count` tokens after a prompt, one by one from the states.

    Args:
        prompt: `[T]` tokens, at least one.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: equal seeds give equal tokens.

    Returns:
        `[count]` int64.

    Raises:
        ValueError: an empty prompt, or a temperature below 0.
    """
    if not prompt.numel():
        raise ValueError("the prompt is empty; it needs at least one token")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number of at least 0; got {temperature}")
    random = torch.Generator(prompt.device).manual_seed(seed)
    logits, states = model.continued(prompt[None])
    drawn: list[Tensor] = []
    while len(drawn) < count:
        if temperature == 0:
            token = logits[0, -1:].argmax(-1)
        else:
            chances = (logits[0, -1].float() / temperature).softmax(-1)
            token = torch.multinomial(chances, 1, generator=random)
        drawn.append(token)
        if len(drawn) < count:
            logits, states = model.continued(token[None], states)
    return torch.cat(drawn) if drawn else prompt[:0]
