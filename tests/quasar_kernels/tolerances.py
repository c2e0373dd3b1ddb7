"""Largest relative RMS errors against float64, by what is compared and by the operands' dtype.

A test that compares something of its own, or inputs that are harder than a layer's, states its own
figure and why. Rounding an exact result alone costs 1.7e-3 in bf16 and 2.1e-4 in fp16.
"""

from __future__ import annotations

import torch

OPERATOR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""The operator's outputs and final state on layer-like inputs: the products take operands of that
dtype, so a result holds the roundings of two or three of them besides its own."""

ADVERSARIAL = 1e-4
"""The same in fp32 on adversarial keys, gradients included: updates cancel, so that what is left
of them has fewer digits."""

RECURRENCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""One token after the other: the state is fp32 and only the output is rounded, to its dtype."""

RECURRENCE_STATE = 2e-6
"""The state of the recurrence, which no dtype of its inputs rounds."""

GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Gradients of the operator: a backward pass has twice the forward's products in a row."""

BETA_GRADIENT = 3e-2
"""Of beta's in half precision: it sums terms of both signs over all tokens, which cancel."""

MAP = {torch.bfloat16: 3e-3, torch.float16: 1e-3}
"""The state that a segment's map adds: the rounding of the values' shares is most of it in bf16."""

LAYER_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Gradients of the layer, its weights' included: the operator's, and four products around it."""

PROJECTION = {torch.bfloat16: 2.5e-3, torch.float16: 8e-4}
"""q, k and v of the fused projection: its products, taps and sums cost 4.8e-4 in fp16."""

GATED_OUTPUT = {torch.bfloat16: 2.3e-3, torch.float16: 1e-3}
"""The gated norm within the output's product: were an operand of that product bf16, it would cost
as much again as the rounding of the result."""
