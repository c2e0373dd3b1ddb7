"""Properties of every implementation of the operator, as tests to inherit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.quasar_kernels.inputs import assert_close, packed, rows_of_one_tensor


class Case(NamedTuple):
    """An implementation, its inputs and the largest relative RMS error against float64."""

    operator: Callable[..., Any]
    inputs: Callable[..., tuple[Tensor, ...]]  # `layer_like`, of tokens and batch
    limit: float
    tokens: int
    batch: int
    packings: list[list[int]]  # lengths of packed sequences
    most_tokens: int | None = None  # of the rerun test; None for `tokens`

    def draw(self) -> tuple[list[Tensor], Tensor]:
        """Return q, k and v, and beta."""
        *qkv, beta = self.inputs(self.tokens, self.batch)
        return qkv, beta

    def states(self, count: int, q: Tensor) -> Tensor:
        """Return random states for sequences with q's heads, [count, H, S, S] fp32."""
        H, S = q.shape[2:]
        return torch.randn(count, H, S, S, device=q.device)


class Semantics:
    """A subclass has a fixture `case`."""

    def test_outputs_do_not_depend_on_later_tokens(self, case: Case) -> None:
        qkv, beta = case.draw()
        before, _ = case.operator(*qkv, beta)
        cut = 4 * case.tokens // 9
        for x in qkv:
            x[:, cut:] = torch.randn_like(x[:, cut:])
        after, _ = case.operator(*qkv, beta)
        assert torch.equal(before[:, :cut], after[:, :cut])
        assert not torch.equal(before[:, cut:], after[:, cut:])

    def test_two_calls_with_the_state_give_the_result_of_one(self, case: Case) -> None:
        qkv, beta = case.draw()
        q, k, v = qkv
        expected, end = quasar_chunked(q, k, v, beta)
        cut = 4 * case.tokens // 9
        first, state = case.operator(*(x[:, :cut] for x in qkv), beta, None, True)
        second, final = case.operator(*(x[:, cut:] for x in qkv), beta, state, True)
        assert_close(torch.cat([first, second], 1), expected, case.limit)
        assert relative_rms(final, end) <= case.limit

    def test_packed_sequences_equal_separate_calls(self, case: Case) -> None:
        for lengths in case.packings:
            *qkv, beta = case.inputs(sum(lengths), 1)
            initial = case.states(len(lengths), qkv[0])
            for index in (torch.int32, torch.int64):
                bounds = packed(lengths, str(beta.device), index)
                o, final = case.operator(*qkv, beta, initial, True, bounds)
                for n, (start, stop) in enumerate(pairwise(bounds.tolist())):
                    q, k, v = (x[:, start:stop] for x in qkv)
                    expected, state = quasar_chunked(q, k, v, beta, initial[n : n + 1])
                    if lengths[n]:
                        assert relative_rms(o[:, start:stop], expected) <= case.limit, lengths
                    assert relative_rms(final[n : n + 1], state) <= case.limit, lengths

    def test_strided_inputs_give_the_same(self, case: Case) -> None:
        qkv, beta = case.draw()
        views = rows_of_one_tensor(*qkv)
        assert not views[0].is_contiguous()
        assert torch.equal(case.operator(*views, beta)[0], case.operator(*qkv, beta)[0])

    def test_reruns_are_bitwise_equal_and_inputs_do_not_change(self, case: Case) -> None:
        inputs = case.inputs(case.most_tokens or case.tokens, case.batch)
        inputs = (*inputs, case.states(case.batch, inputs[0]))
        copies = [x.clone() for x in inputs]
        first, second = (case.operator(*inputs, True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        assert all(torch.equal(x, c) for x, c in zip(inputs, copies, strict=True))
