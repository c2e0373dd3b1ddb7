"""Largest relative RMS errors against float64, by kind of result and dtype of the operands.

A test of other results, or of inputs that are more difficult than a layer's, has its own limit and
states why. Rounding an exact result alone gives 1.7e-3 in bf16 and 2.1e-4 in fp16.
"""

import torch

OPERATOR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""The operator's outputs and final state on layer-like inputs. The products have operands of this
dtype, so a result has the rounding errors of two or three products and its own."""

ADVERSARIAL = 1e-4
"""The same in fp32 on adversarial keys, with gradients: updates cancel, which loses digits."""

RECURRENCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""Token by token: the state is fp32, and only the output is rounded to its dtype."""

RECURRENCE_STATE = 2e-6
"""The state of the recurrence, which is fp32 for every dtype of the inputs."""

GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Gradients of the operator: a backward pass has twice as many successive products."""

BETA_GRADIENT = 3e-2
"""The gradient of beta in half precision: its terms of both signs, over all tokens, cancel. Float64
arithmetic on inputs and weights rounded to bf16 has errors of up to 2.6e-2 (docs/layer.md)."""

MAP = {torch.bfloat16: 3e-3, torch.float16: 1e-3}
"""The state that a segment's map adds; in bf16, most of the error is the values' rounding."""

LAYER_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Gradients of the layer and its weights: the operator's error, and that of four products."""

PROJECTION = {torch.bfloat16: 2.5e-3, torch.float16: 8e-4}
"""q, k and v of the fused projection: products, taps and sums give 4.8e-4 in fp16."""

GATED_OUTPUT = {torch.bfloat16: 2.3e-3, torch.float16: 1e-3}
"""The fused gated norm and output product; a bf16 operand would double the error."""
