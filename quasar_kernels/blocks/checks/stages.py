"""The model checks G0 to G4: kernels, causality, entropy at the start, learning, balance."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quasar_kernels.blocks import HybridBlock
from quasar_kernels.blocks.checks.branches import analyse
from quasar_kernels.blocks.checks.findings import Finding, Verdict, grade
from quasar_kernels.blocks.checks.training import BATCH, TOKENS, draw, train

LEAK = {False: 1e-4, True: 2e-2}
"""The largest change of earlier logits by later tokens, relative to the logits' RMS.

The key is whether the model is on a GPU: fp32 on a CPU, bf16 autocast on a GPU.
"""
ENTROPY = 0.05
"""The largest relative difference between the initial entropy and log(vocabulary)."""
FALL, TOLERABLE_FALL = 0.25, 0.1
"""The smallest relative fall of the loss in 100 steps: for PASS, and for WARN."""
GRADIENTS, TOLERABLE_GRADIENTS = (0.1, 10.0), (1e-3, 1e3)
"""The range of the gradient norms of all steps: for PASS, and for WARN."""
RATIO, TOLERABLE_RATIO = 3.0, 10.0
"""The largest initial ratio between the branches of a block: for PASS, and for WARN."""
RISE = 1e-3
"""A branch is useful if the loss without it is higher by at least this, in nats."""


def check_model(model: nn.Module, steps: int, device: torch.device) -> Iterator[Finding]:
    """Check a model on its device, stage by stage; its parameters do not change.

    Args:
        model: maps tokens `[B, T]` int64 to logits `[B, T, vocabulary]`, and has the attribute
            `vocabulary`; the balance of its `HybridBlock`s is checked.
        steps: number of steps of the mini-training.
    """
    yield from kernels(model)
    vocabulary: int = model.vocabulary  # type: ignore[assignment]
    try:
        yield from forward(model, vocabulary, device)
    except Exception as error:  # the user's model may raise any type
        yield _finding("G1", "runs", Verdict.FAIL, f"it raises {type(error).__name__}: {error}")
        return
    yield beginning(model, vocabulary, device)
    trained = copy.deepcopy(model)
    yield from balance(trained, vocabulary, device)
    yield from learning(trained, vocabulary, steps, device)
    yield from ablations(trained, vocabulary, device)


def _finding(gate: str, what: str, verdict: Verdict, text: str, **figures: float) -> Finding:
    return Finding(gate=gate, what=what, verdict=verdict, told=text, figures=figures)


def _pass_if(condition: bool) -> Verdict:
    return Verdict.PASS if condition else Verdict.FAIL


def kernels(model: nn.Module) -> Iterator[Finding]:
    """G0: the backend of each kind of branch. A GPU without kernels is a warning."""
    seen = set()
    for block in model.modules():
        if not isinstance(block, HybridBlock):
            continue
        on_gpu = next(block.parameters()).is_cuda
        for name, backend in block.backends(torch.bfloat16 if on_gpu else None).items():
            if name in seen:
                continue
            seen.add(name)
            slow = on_gpu and backend.name == "torch"
            text = "; ".join(filter(None, (f"{backend.name}: {backend.reason}", backend.remedy)))
            yield _finding("G0", name, Verdict.WARN if slow else Verdict.PASS, text)
    if not seen:
        text = "the model contains no HybridBlock, so its kernels are unknown"
        yield _finding("G0", "kernels", Verdict.PASS, text)


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, tokens.is_cuda):
        logits: Tensor = model(tokens)
    return logits.float()


def forward(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G1: the logits have the right shape, are finite, and do not depend on later tokens."""
    tokens = draw(vocabulary, 0, device)
    logits = _logits(model, tokens)
    wanted, got = [BATCH, TOKENS, vocabulary], list(logits.shape)
    yield _finding("G1", "shape", _pass_if(got == wanted), f"{got}, required {wanted}")
    bad = int((~torch.isfinite(logits)).sum())
    text = f"{bad} logits are NaN or Inf"
    yield _finding("G1", "finite", _pass_if(not bad), text, not_finite=bad)
    if got != wanted:
        return
    leak = 0.0
    for place in (1, TOKENS // 2, TOKENS - 1):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 1) % vocabulary
        moved = (_logits(model, changed) - logits)[:, :place].abs().max()
        # comparisons with NaN are false, so `max` could drop a NaN
        share = float(moved / logits.square().mean().sqrt())
        leak = share if math.isnan(share) else max(leak, share)
    limit = LEAK[tokens.is_cuda]
    text = f"later tokens change earlier logits by {leak:.1e} of their RMS, limit {limit:g}"
    yield _finding("G1", "causal", _pass_if(leak <= limit), text, leak=leak)


def beginning(model: nn.Module, vocabulary: int, device: torch.device) -> Finding:
    """G2: an untrained model predicts all tokens about equally: its entropy is log(vocabulary)."""
    chances = _logits(model, draw(vocabulary, 1, device)).log_softmax(-1)
    entropy = float(-(chances.exp() * chances).sum(-1).mean())
    share = entropy / math.log(vocabulary)
    text = f"{entropy:.3f} nats, {share:.1%} of log({vocabulary}), limit {1 - ENTROPY:.0%}"
    verdict = _pass_if(abs(share - 1) <= ENTROPY)
    return _finding("G2", "entropy at the start", verdict, text, entropy=entropy, share=share)


def learning(
    model: nn.Module, vocabulary: int, steps: int, device: torch.device
) -> Iterator[Finding]:
    """G3: the loss falls, gradient norms stay in their range, and every parameter learns.

    Trains the model in place.
    """
    history = train(model, vocabulary, steps, device)
    first, last, fall = history.losses[0], history.losses[-1], history.fall
    text = f"{first:.2f} to {last:.2f} nats in {len(history.losses)} steps, a fall of {fall:.0%}"
    verdict = grade(fall, fall >= FALL, fall >= TOLERABLE_FALL)
    text = f"{text}, limit {FALL:.0%}"
    yield _finding("G3", "loss", verdict, text, first=first, last=last, fall=fall)
    low, high = min(history.gradient_norms), max(history.gradient_norms)
    good = GRADIENTS[0] <= low <= high <= GRADIENTS[1]
    tolerable = TOLERABLE_GRADIENTS[0] <= low <= high <= TOLERABLE_GRADIENTS[1]
    text = f"norms from {low:.2g} to {high:.2g}, limits {GRADIENTS[0]:g} and {GRADIENTS[1]:g}"
    verdict = grade(sum(history.gradient_norms), good, tolerable)  # NaN if one norm is NaN
    yield _finding("G3", "gradients", verdict, text, low=low, high=high)
    dead = history.dead
    text = f"without a gradient in all steps: {', '.join(dead)}" if dead else "none"
    yield _finding("G3", "dead parameters", _pass_if(not dead), text, dead=len(dead))


def balance(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G4, before training: the branches of a block are about equally strong."""
    _, blocks = analyse(model, vocabulary, device)
    for block in blocks:
        for figure, words in (("activation", "RMS added"), ("gradient", "gradient norms")):
            ratio = block.ratio(figure)
            figures = {b.name: getattr(b, figure) for b in block.branches}
            each = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
            text = f"{each}: ratio {ratio:.2f}, limit {RATIO:g}"
            verdict = grade(ratio, ratio <= RATIO, ratio <= TOLERABLE_RATIO)
            yield _finding("G4", f"{block.name} {words}", verdict, text, **figures, ratio=ratio)


def ablations(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G4, after training: removing a branch raises the loss."""
    loss, blocks = analyse(model, vocabulary, device)
    for block in blocks:
        for branch in block.branches:
            rise = branch.without - loss
            text = f"the loss rises from {loss:.3f} by {rise:.3f} nats, limit {RISE:g}"
            verdict = grade(rise, rise >= RISE, rise > 0)
            what = f"{block.name} without {branch.name}"
            yield _finding("G4", what, verdict, text, loss=loss, rise=rise)
