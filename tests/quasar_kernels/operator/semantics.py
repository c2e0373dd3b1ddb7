"""What every implementation of the operator does, whatever it is written in: tests to inherit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.quasar_kernels.inputs import assert_close, packed, rows_of_one_tensor


class Subject(NamedTuple):
    """An implementation, the inputs it is tested with, and how near to float64 it has to be."""

    operator: Callable[..., Any]
    inputs: Callable[..., tuple[Tensor, ...]]  # layer_like of tokens and a batch
    limit: float
    tokens: int
    batch: int
    packings: list[list[int]]
    most_tokens: int | None = None  # to run twice; None: no more than `tokens`

    def draw(self) -> tuple[list[Tensor], Tensor]:
        """q, k and v, and beta."""
        *qkv, beta = self.inputs(self.tokens, self.batch)
        return qkv, beta

    def states(self, count: int, q: Tensor) -> Tensor:
        """Random states for sequences with q's heads, [count, H, S, S] fp32."""
        H, S = q.shape[2:]
        return torch.randn(count, H, S, S, device=q.device)


class Semantics:
    """A subclass has its module's fixture `subject`."""

    def test_the_future_does_not_reach_the_past(self, subject: Subject) -> None:
        qkv, beta = subject.draw()
        before, _ = subject.operator(*qkv, beta)
        cut = 4 * subject.tokens // 9
        for x in qkv:
            x[:, cut:] = torch.randn_like(x[:, cut:])
        after, _ = subject.operator(*qkv, beta)
        assert torch.equal(before[:, :cut], after[:, :cut])
        assert not torch.equal(before[:, cut:], after[:, cut:])

    def test_two_halves_with_the_state_carried_equal_the_whole(self, subject: Subject) -> None:
        qkv, beta = subject.draw()
        q, k, v = qkv
        expected, end = quasar_chunked(q, k, v, beta)
        cut = 4 * subject.tokens // 9
        first, state = subject.operator(*(x[:, :cut] for x in qkv), beta, None, True)
        second, final = subject.operator(*(x[:, cut:] for x in qkv), beta, state, True)
        assert_close(torch.cat([first, second], 1), expected, subject.limit)
        assert relative_rms(final, end) <= subject.limit

    def test_packed_sequences_equal_separate_calls(self, subject: Subject) -> None:
        for lengths in subject.packings:
            *qkv, beta = subject.inputs(sum(lengths), 1)
            initial = subject.states(len(lengths), qkv[0])
            for index in (torch.int32, torch.int64):
                bounds = packed(lengths, str(beta.device), index)
                o, final = subject.operator(*qkv, beta, initial, True, bounds)
                for n, (start, stop) in enumerate(pairwise(bounds.tolist())):
                    q, k, v = (x[:, start:stop] for x in qkv)
                    expected, state = quasar_chunked(q, k, v, beta, initial[n : n + 1])
                    if lengths[n]:
                        assert relative_rms(o[:, start:stop], expected) <= subject.limit, lengths
                    assert relative_rms(final[n : n + 1], state) <= subject.limit, lengths

    def test_strided_inputs_give_the_same(self, subject: Subject) -> None:
        qkv, beta = subject.draw()
        views = rows_of_one_tensor(*qkv)
        assert not views[0].is_contiguous()
        assert torch.equal(subject.operator(*views, beta)[0], subject.operator(*qkv, beta)[0])

    def test_reruns_are_bitwise_equal_and_inputs_stay(self, subject: Subject) -> None:
        inputs = subject.inputs(subject.most_tokens or subject.tokens, subject.batch)
        given = (*inputs, subject.states(subject.batch, inputs[0]))
        copies = [x.clone() for x in given]
        first, second = (subject.operator(*given, True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        assert all(torch.equal(x, c) for x, c in zip(given, copies, strict=True))
