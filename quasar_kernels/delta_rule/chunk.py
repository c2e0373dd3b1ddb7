"""The delta rule over whole sequences, by chunks, with fla's signatures."""

from __future__ import annotations

from typing import Any

from fla.ops.quasar.backend import MAX_HEAD_DIM
from fla.ops.quasar.checkpoints import check_every, run_with_checkpoints
from fla.ops.quasar.chunk import run_chunks
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.preparation import Preparation
from fla.ops.quasar.traceable import traceable
from torch import Tensor

from quasar_kernels.delta_rule import inputs
from quasar_kernels.delta_rule.heads import Heads


@traceable("int chunk_size=64", in_cuda_graphs=False)  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: Any = None,
    checkpoint_every: int | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Apply the delta rule (arXiv 2406.06484) to whole sequences.

    For every sequence and head: S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and
    o_t = scale S_t^T q_t. Keys should have at most unit length, as with `use_qk_l2norm_in_kernel`:
    where beta_t |k_t|^2 exceeds 2, the state grows.

    Args:
        q, k: `[B, T, H, K]`, bf16, fp16, fp32 or fp64, of any strides; T may be 0.
        v: `[B, T, HV, V]`, HV a multiple of H.
        beta: `[B, T, HV]`, the step sizes, not negative.
        scale: factor of the output; None is 1 / sqrt(K).
        initial_state: `[N, HV, K, V]`, for N sequences (B without `cu_seqlens`); None is zero.
        output_final_state: whether to return the state after each sequence.
        use_qk_l2norm_in_kernel: whether to normalise q and k to unit length first.
        cu_seqlens: `[N + 1]` int32 or int64 bounds of sequences packed in one row (B = 1), empty
            ones included. Values on a GPU are read once for each version of the tensor. Collectives
            such as `dist.broadcast` write without a new version: pass a new tensor after them.
        cu_seqlens_cpu: a copy of the bounds on the host; those on the GPU are then not read.
        cp_context: from fla's `build_cp_context` (contiguous layout), or from the one in
            `fla.ops.quasar.parallel.context`, which allows slices of any lengths. The tensors are
            then this rank's slice of packed sequences (B = 1), and the context's bounds replace
            cu_seqlens. Every rank must call. States (fla supports none with a context) are those of
            the slice's sequences; the initial state of a sequence that begins on an earlier rank is
            ignored.
        checkpoint_every: n, to return also the states after every n tokens of each sequence, from
            which other sequences with the same prefix can continue. On a GPU, this takes one pass
            if n is a multiple of 128 and autograd does not record the call; otherwise one pass for
            every n tokens.
        kwargs: `chunk_size`, which is ignored.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state `[N, HV, K, V]` fp32 (fp64 for fp64
        inputs) or None. With `checkpoint_every`, also the checkpoints `[B, T // n, HV, K, V]`;
        those of packed sequences follow one another in one row. Gradients reach q, k, v, beta and
        initial_state, from all results.

    Raises:
        ValueError: an argument is not a tensor of these dtypes, shapes are inconsistent, there is
            no head or channel, the tensors are on several devices, the bounds do not rise from 0
            to T, bounds on the host differ from `cu_seqlens_cpu`, the scale is not a number, an
            option is unknown, `checkpoint_every` is below 1 or used with a cp_context, or
            QUASAR_BACKEND has an unknown value.
        CudaUnavailableError: QUASAR_BACKEND is `cuda`, and the CUDA kernels do not support the call
            or fail.
        RuntimeError: the exchange with other ranks failed, because a rank ended or timed out.
    """
    inputs.check_options(chunk_delta_rule, kwargs)
    if cp_context is not None:
        cu_seqlens, cu_seqlens_cpu = cp_context.cu_seqlens, cp_context.cu_seqlens_cpu
    inputs.check(q, k, v, scale, initial_state, cu_seqlens, beta=beta)
    bounds = inputs.bounds_on_host(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    how = inputs.preparation(use_qk_l2norm_in_kernel)
    options = scale, initial_state, output_final_state, how
    return _chunks(q, k, v, None, beta, *options, bounds, cp_context, checkpoint_every)


@traceable(
    "int chunk_size=64",
    "bool use_gate_in_kernel=False",
    "Tensor? A_log=None",
    "Tensor? dt_bias=None",
    in_cuda_graphs=False,
)  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,  # noqa: ARG001 # of fla's signature
    cp_context: Any = None,
    *,
    checkpoint_every: int | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Apply the gated delta rule (arXiv 2412.06464) to whole sequences.

    As `chunk_delta_rule`, but the state decays before each token:
    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T. Only sums of g between tokens
    are exponentiated. They are not positive, so no decay can overflow.

    Args:
        g: `[B, T, HV]`, log decays, not positive; with `use_gate_in_kernel` the input of
            -exp(A_log) softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: whether the step sizes are sigmoid(beta).
        allow_neg_eigval: whether the step sizes are 2 sigmoid(beta); it needs
            `use_beta_sigmoid_in_kernel`.
        state_v_first: whether states are `[N, HV, V, K]`.
        chunk_indices: an argument of fla's function, which is ignored.
        kwargs: `use_gate_in_kernel`, `A_log` and `dt_bias` `[HV]`, the older name of
            `state_v_first`, and `chunk_size`.

    Returns:
        As `chunk_delta_rule`; g, A_log and dt_bias also get gradients.

    Raises:
        ValueError: as `chunk_delta_rule`; or `use_gate_in_kernel` without A_log, or
            `allow_neg_eigval` without the sigmoid.
        CudaUnavailableError, RuntimeError: as `chunk_delta_rule`.
    """
    v_first = inputs.value_first(state_v_first, kwargs)
    inputs.check_options(chunk_gated_delta_rule, kwargs, "use_gate_in_kernel", "A_log", "dt_bias")
    if cp_context is not None:
        cu_seqlens, cu_seqlens_cpu = cp_context.cu_seqlens, cp_context.cu_seqlens_cpu
    inputs.check(q, k, v, scale, initial_state, cu_seqlens, v_first, g=g, beta=beta)
    if kwargs.get("use_gate_in_kernel"):
        g = inputs.log_decays(g, kwargs.get("A_log"), kwargs.get("dt_bias"))
    sigmoid = use_beta_sigmoid_in_kernel, allow_neg_eigval
    how = inputs.preparation(use_qk_l2norm_in_kernel, *sigmoid)
    bounds = inputs.bounds_on_host(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    state = inputs.transpose_if(v_first, initial_state)
    options = scale, state, output_final_state, how
    o, *states = _chunks(q, k, v, g, beta, *options, bounds, cp_context, checkpoint_every)
    return o, *(inputs.transpose_if(v_first, x) for x in states)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    how: Preparation,
    cu_seqlens: Tensor | None,
    cp_context: Any,
    checkpoint_every: int | None,
) -> tuple[Any, ...]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    K, V = q.shape[-1], v.shape[-1]
    heads = Heads(K, V, q.is_cuda and K <= MAX_HEAD_DIM)
    state = None if initial_state is None else heads.cut_state(initial_state)
    decays = None if g is None else heads.scalars(g)
    tensors = q, k, heads.cut(v), heads.scalars(beta)
    checkpoints: tuple[Tensor, ...] = ()
    if checkpoint_every is None:
        o, final = run_chunks(
            *tensors, state, output_final_state, cu_seqlens, scale, decays, cp_context, how
        )
    else:
        check_every(checkpoint_every, cp_context)
        o, final, found = run_with_checkpoints(
            checkpoint_every, *tensors, state, cu_seqlens, scale, decays, how
        )
        joined = heads.joined_state(found.flatten(0, 1))
        checkpoints = (joined.reshape(*found.shape[:2], *joined.shape[1:]),)
        final = final if output_final_state else None
    results = heads.joined(o), None if final is None else heads.joined_state(final)
    if not q.numel():
        results = inputs.with_zero_gradients(results, q, k, v, beta, g, initial_state)
    return *results, *checkpoints
