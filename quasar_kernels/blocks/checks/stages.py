"""The model checks G0 to G4: kernels, causality, entropy at the start, learning, balance."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quasar_kernels.blocks import HybridBlock
from quasar_kernels.blocks.checks.branches import looked_at
from quasar_kernels.blocks.checks.findings import Finding, Verdict, graded
from quasar_kernels.blocks.checks.training import BATCH, TOKENS, draw, train

LEAK = {False: 1e-4, True: 2e-2}
"""The largest change of earlier logits by later tokens, as a share of their RMS, by autocast."""
ENTROPY = 0.05
"""The largest relative difference between the initial entropy and log(vocabulary)."""
FALL, BEARABLE_FALL = 0.25, 0.1
"""The relative fall of the loss in 100 steps: the least for PASS, and the least for WARN."""
GRADIENTS, BEARABLE_GRADIENTS = (0.1, 10.0), (1e-3, 1e3)
"""The range of every step's gradient norm: for PASS, and for WARN."""
RATIO, BEARABLE_RATIO = 3.0, 10.0
"""The largest initial ratio between a block's branches: for PASS, and for WARN."""
HURT = 1e-3
"""The least rise of the loss, in nats, without a branch that is useful."""


def check_model(model: nn.Module, steps: int, device: torch.device) -> Iterator[Finding]:
    """Check a model on its device, stage by stage; its parameters are not changed.

    Args:
        model: takes tokens `[B, T]` int64, returns logits `[B, T, vocabulary]`, and has
            `vocabulary`; balance is checked in its `HybridBlock`s.
        steps: of the mini-training.
    """
    yield from kernels(model)
    vocabulary: int = model.vocabulary  # type: ignore[assignment]
    try:
        yield from forward(model, vocabulary, device)
    except Exception as error:  # the code of the user's model may raise any type
        text = f"it raises {type(error).__name__}: {error}"
        yield Finding(gate="G1", what="runs", verdict=Verdict.FAIL, told=text)
        return
    yield beginning(model, vocabulary, device)
    trained = copy.deepcopy(model)
    yield from balance(trained, vocabulary, device)
    yield from learning(trained, vocabulary, steps, device)
    yield from ablations(trained, vocabulary, device)


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
            verdict = Verdict.WARN if slow else Verdict.PASS
            yield Finding(gate="G0", what=name, verdict=verdict, told=text)
    if not seen:
        text = "no HybridBlock is in it, so nothing is known of its kernels"
        yield Finding(gate="G0", what="kernels", verdict=Verdict.PASS, told=text)


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, tokens.is_cuda):
        logits: Tensor = model(tokens)
    return logits.float()


def forward(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G1: shape, finite values, and logits that no later token changes."""
    tokens = draw(vocabulary, 0, device)
    logits = _logits(model, tokens)
    wanted, got = [BATCH, TOKENS, vocabulary], list(logits.shape)
    text = f"the shape is {got}, required is {wanted}"
    fits = got == wanted
    verdict = Verdict.PASS if fits else Verdict.FAIL
    yield Finding(gate="G1", what="shape", verdict=verdict, told=text)
    bad = int((~torch.isfinite(logits)).sum())
    verdict = Verdict.FAIL if bad else Verdict.PASS
    yield Finding(gate="G1", what="finite", verdict=verdict, told=f"{bad} logits are NaN or Inf",
                  figures={"not_finite": bad})  # fmt: skip
    if not fits:
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
    yield Finding(gate="G1", what="causal", verdict=graded(leak, leak <= limit, False), told=text,
                  figures={"leak": leak})  # fmt: skip


def beginning(model: nn.Module, vocabulary: int, device: torch.device) -> Finding:
    """G2: before training a model knows nothing, so its entropy is log(vocabulary)."""
    chances = _logits(model, draw(vocabulary, 1, device)).log_softmax(-1)
    entropy = float(-(chances.exp() * chances).sum(-1).mean())
    share = entropy / math.log(vocabulary)
    text = f"{entropy:.3f} nats, {share:.1%} of log({vocabulary}), limit {1 - ENTROPY:.0%}"
    verdict = graded(share, abs(share - 1) <= ENTROPY, False)
    figures = {"entropy": entropy, "share": share}
    return Finding(gate="G2", what="entropy at the start", verdict=verdict, told=text,
                   figures=figures)  # fmt: skip


def learning(
    model: nn.Module, vocabulary: int, steps: int, device: torch.device
) -> Iterator[Finding]:
    """G3: the loss falls, gradients stay in bounds, every parameter learns.

    Trains the model in place.
    """
    course = train(model, vocabulary, steps, device)
    first, last, fall = course.losses[0], course.losses[-1], course.fall
    text = f"{first:.2f} to {last:.2f} nats in {len(course.losses)} steps, by {fall:.0%}"
    yield Finding(gate="G3", what="loss", verdict=graded(fall, fall >= FALL, fall >= BEARABLE_FALL),
                  told=f"{text}, limit {FALL:.0%}",
                  figures={"first": first, "last": last, "fall": fall})  # fmt: skip
    low, high = min(course.gradient_norms), max(course.gradient_norms)
    good = GRADIENTS[0] <= low <= high <= GRADIENTS[1]
    bearable = BEARABLE_GRADIENTS[0] <= low <= high <= BEARABLE_GRADIENTS[1]
    text = f"norms from {low:.2g} to {high:.2g}, limits {GRADIENTS[0]:g} and {GRADIENTS[1]:g}"
    yield Finding(gate="G3", what="gradients", told=text, figures={"low": low, "high": high},
                  verdict=graded(sum(course.gradient_norms), good, bearable))  # fmt: skip
    dead = course.dead
    text = f"without a gradient in all steps: {', '.join(dead)}" if dead else "none"
    verdict = Verdict.FAIL if dead else Verdict.PASS
    yield Finding(gate="G3", what="dead parameters", verdict=verdict, told=text,
                  figures={"dead": len(dead)})  # fmt: skip


def balance(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G4, first half: at the start no branch of a block dominates another."""
    _, blocks = looked_at(model, vocabulary, device)
    for block in blocks:
        for of, words in (("activation", "RMS added"), ("gradient", "gradient norms")):
            ratio = block.ratio(of)
            figures = {b.name: getattr(b, of) for b in block.branches}
            each = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
            text = f"{each}: ratio {ratio:.2f}, limit {RATIO:g}"
            verdict = graded(ratio, ratio <= RATIO, ratio <= BEARABLE_RATIO)
            yield Finding(gate="G4", what=f"{block.name} {words}", verdict=verdict, told=text,
                          figures={**figures, "ratio": ratio})  # fmt: skip


def ablations(model: nn.Module, vocabulary: int, device: torch.device) -> Iterator[Finding]:
    """G4, second half: a trained model is worse without any one branch."""
    loss, blocks = looked_at(model, vocabulary, device)
    for block in blocks:
        for branch in block.branches:
            rise = branch.without - loss
            text = f"the loss rises from {loss:.3f} by {rise:.3f} nats, limit {HURT:g}"
            verdict = graded(rise, rise >= HURT, rise > 0)
            yield Finding(gate="G4", what=f"{block.name} without {branch.name}", verdict=verdict,
                          told=text, figures={"loss": loss, "rise": rise})  # fmt: skip
