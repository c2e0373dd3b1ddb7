"""Largest relative RMS errors against float64, by the kind of result and the operands' dtype.

A test of other results, or of harder inputs than a layer's, has its own limit. Rounding an exact
result gives an error of 1.7e-3 in bf16 and 2.1e-4 in fp16.
"""

from __future__ import annotations

import torch

OPERATOR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""The operator's outputs and final state on layer-like inputs. The operands of two or three
consecutive products are rounded to that dtype, and so is the result."""

ADVERSARIAL = 1e-4
"""The same in fp32 on adversarial keys, gradients included: updates cancel, so that the result has
fewer correct digits."""

RECURRENCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""The recurrence token by token: the state is fp32, and only the output is rounded to its dtype."""

RECURRENCE_STATE = 2e-6
"""The recurrence's state, which is fp32 for inputs of any dtype."""

GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Gradients of the operator: the backward pass has twice as many products in a row."""

BETA_GRADIENT = 3e-2
"""Beta's gradient in 16 bits: a sum over all tokens whose terms of both signs cancel."""

MAP = {torch.bfloat16: 3e-3, torch.float16: 1e-3}
"""A segment's R: in bf16 most of the error is the rounding of the operand Y."""

LAYER_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Gradients of the layer and its weights: through the operator and four products around it."""

PROJECTION = {torch.bfloat16: 2.5e-3, torch.float16: 8e-4}
"""q, k and v of the fused projection: its fp16 products, taps and sums add an error of 4.8e-4."""

GATED_OUTPUT = {torch.bfloat16: 2.3e-3, torch.float16: 1e-3}
"""The gated output. Its product has fp16 operands for both dtypes: a bf16 operand would add as much
error as the rounding of the result."""
