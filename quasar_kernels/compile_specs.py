"""The compile specs of the overlay's Triton kernels, for checks without a GPU.

Triton compiles kernels at their first use on a GPU. With these specs, any machine can compile them
for any architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities to compile for: A100, RTX 30, RTX 40 and L40, H200, B200, RTX 50."""


@dataclass(frozen=True)
class CompileSpec:
    """One kernel with the types of its arguments."""

    name: str  # kernel and variant, for messages
    kernel: Any  # the `triton.jit` function
    signature: Mapping[str, str]  # Triton's type (`*bf16`, `i32`) of each run-time argument by name
    constexprs: Mapping[str, Any]  # value of every other argument; None means an absent tensor
    num_warps: int = 4
    num_stages: int = 3


def ast_source(spec: CompileSpec) -> Any:
    """Return Triton's ASTSource of a spec; its `hash()` covers code, types and constants.

    Raises:
        ValueError: the spec's names are not the kernel's arguments.
    """
    from triton.compiler import ASTSource

    names = list(spec.kernel.arg_names)
    unknown = {*spec.signature, *spec.constexprs} ^ set(names)
    if unknown:
        raise ValueError(f"{spec.name}: the spec and the kernel disagree on {sorted(unknown)}")
    types = {name: spec.signature.get(name, "constexpr") for name in names}
    # torch aligns its tensors, and the layer's strides are multiples of 16
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if (types[name].startswith("*") or "stride" in name)
        and not spec.kernel.params[i].do_not_specialize
    }
    return ASTSource(spec.kernel, types, dict(spec.constexprs), aligned)


def compile_spec(spec: CompileSpec, architecture: int) -> Any:
    """Compile one kernel for compute capability `architecture` (90 is 9.0); needs no GPU.

    Returns:
        Triton's compiled kernel; `.asm["ptx"]` and `.metadata.shared` have the results.

    Raises:
        ValueError: the spec's names are not the kernel's arguments.
        Exception: Triton's, if the kernel does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(ast_source(spec), target=target, options=options)  # type: ignore[no-untyped-call]


def compile_specs(architecture: int = 90) -> list[CompileSpec]:
    """Return every kernel of the overlay, with the tiles for compute capability `architecture`.

    Imports the overlay, so `mount` it first.
    """
    specs = [*_chunk_specs(architecture), *_operator_specs(), *_layer_specs()]
    return [*specs, *_adaptive_specs()]


def typed(kind: str, names: str) -> dict[str, str]:
    """Return one type for several arguments; spaces separate their names."""
    return dict.fromkeys(names.split(), kind)


def _shapes(architecture: int) -> Iterator[tuple[str, int, str, Any]]:
    """Yield operand type, head width, the name's suffix and the tiles, for all shipped tiles."""
    import torch
    from fla.ops.quasar.triton_kernels.tiles import shipped_tiles

    capability = f"{architecture // 10}.{architecture % 10}"
    for kind, dtype, S in (
        ("bf16", torch.bfloat16, 64),
        ("bf16", torch.bfloat16, 128),
        ("fp32", torch.float32, 64),
    ):
        for gpu, tiles in shipped_tiles(S, dtype, capability).items():
            yield kind, S, f" {gpu}".rstrip(), tiles


def _chunk_specs(architecture: int) -> list[CompileSpec]:
    """Return the specs of the segmented scan's kernels for all shipped tiles."""
    return [
        spec
        for shape in _shapes(architecture)
        for gated in (False, True)
        # wide heads with a decay are compiled for one architecture only, because that takes long
        if not gated or (shape[0] == "bf16" and (shape[1] == 64 or architecture == 90))
        for spec in _scan_specs(*shape, gated)
    ]


def _scan_specs(kind: str, S: int, label: str, tiles: Any, gated: bool) -> list[CompileSpec]:
    """Return the specs for some tiles; `gated` kernels read step sizes and have decays."""
    import torch
    from fla.ops.quasar import chunk_intra_token_parallel as intra
    from fla.ops.quasar.triton_kernels import segmented_scan, segmented_scan_bwd

    precision = "tf32x3" if kind == "fp32" else "tf32"
    shape = {"H": 8, "S": S, "BS": S}
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    shared = tiles.value_cols >= S  # B is stored in o's rows
    columns = S if shared else intra.inverse_width(tiles.chunk, dtype)
    walk = shape | {"C": tiles.chunk, "PRECISION": precision, "IS_VARLEN": False, "table": None}
    packed = walk | {"PACK": intra.rows_packed(tiles.chunk, dtype, columns)}
    starts = {"HAS_INITIAL": True, "HAS_STATES": True}
    sizes = typed("i32", "T NS SEG")
    q, k, v, o, a = (
        typed("i32", f"stride_{x}b stride_{x}t stride_{x}h") for x in ("q", "k", "v", "o", "a")
    )
    inverse = {"inverse": f"*{kind}"} | a
    fp32 = {"beta": "*fp32", "scale": "fp32"}
    states = typed("*fp32", "states initial_state")
    decay: dict[str, Any] = {"g": "*fp32"} if gated else {}
    without: dict[str, Any] = {} if gated else {"g": None}
    step = {"READ_STEP": gated}
    absent = [] if gated else ["checkpoints", "states", "initial_state", "begins"]
    walked = typed("*fp32", "states initial_state begins") if gated else {}
    kept = {"checkpoints": f"*{kind}"} if gated else {}
    scan = shape | {"BV": tiles.scan_cols, "IS_VARLEN": False, "first": None}
    rows = [
        (
            intra.chunk_intra_kernel,
            {"k": f"*{kind}", "beta": "*fp32"} | inverse | sizes | k,
            packed | step | {"N": tiles.intra_chunks},
            (tiles.intra_warps, tiles.intra_stages),
        ),
        (
            segmented_scan.segment_map_kernel,
            typed(f"*{kind}", "k v") | inverse | sizes | k | v
            | typed("*fp32", "G_out R_out") | decay,
            packed | without | {"BR": tiles.map_rows},
            (tiles.map_warps, tiles.map_stages),
        ),
        (
            segmented_scan.segment_scan_kernel,
            typed("*fp32", "G R initial_state") | {"NS": "i32"},
            scan | {"HAS_INITIAL": True, "EXACT": kind == "fp32", "BACKWARD": False},
            (tiles.scan_warps, 2 if kind == "fp32" else 1),
        ),
        (
            segmented_scan.segment_output_kernel,
            typed(f"*{kind}", "q k v o") | states | {"final_state": "*fp32"}
            | {"scale": "fp32"} | inverse | sizes | q | k | v | o | decay,
            packed | starts | without | {"checkpoints": None}
            | {"BV": tiles.value_cols, "STORE_FINAL": True, "STORE_FRESH": False},
            (tiles.output_warps, tiles.output_stages),
        ),
        (
            segmented_scan_bwd.segment_state_grad_kernel,
            typed(f"*{kind}", "q k fresh do dv dk")
            | typed("*fp32", "entering d_final E_out d_initial")
            | {"scale": "fp32"} | inverse | sizes | q | k | o | decay | kept | walked,
            packed | without | dict.fromkeys(absent)
            | {"MAP_ONLY": False, "HAS_FINAL": True}
            | {"HAS_ENTERING": True, "STORE_INITIAL": True},
            (tiles.grad_warps, 1),
        ),
        (
            segmented_scan_bwd.segment_input_grad_kernel,
            typed(f"*{kind}", "q k fresh do dv dq dk") | states | {"dbeta": "*fp32"}
            | fp32 | sizes | q | k | o | decay | ({"dg": "*fp32"} if gated else {}),
            walk | starts | step | without | ({} if gated else {"dg": None}),
            (tiles.grad_warps, 1),
        ),
    ]  # fmt: skip
    if gated:
        rows = [row for row in rows if row[0] is not segmented_scan.segment_scan_kernel]
        rows.append(
            (
                segmented_scan_bwd.decay_grad_kernel,
                typed("*fp32", "dg begins") | sizes,
                {"table": None, "H": 8, "KEEP": S, "IS_VARLEN": False},
                (1, 3),
            )
        )
    return [
        CompileSpec(
            f"{kernel.fn.__name__.removesuffix('_kernel')} {kind} S={S}{label}"
            + (" gated" if gated else ""),
            kernel,
            types,
            constants,
            *launch,
        )
        for kernel, types, constants, launch in rows
    ]


def _operator_specs() -> list[CompileSpec]:
    from fla.ops.quasar import forward_substitution, fused_recurrent, gate, preparation

    specs = [
        CompileSpec(
            "forward_substitution",
            forward_substitution.forward_substitution_kernel,
            typed("*fp32", "L_ptr A_ptr") | typed("i32", "L_stride_bh A_stride_bh"),
            {"BT": 64, "C": 64},
        )
    ]
    for kernel, names in (
        (gate.quasar_gate_fwd_kernel, "lam beta alpha"),
        (gate.quasar_gate_bwd_kernel, "lam beta dalpha dlam dbeta"),
    ):
        name, types = kernel.fn.__name__.removesuffix("_kernel"), typed("*fp32", names)
        specs.append(CompileSpec(name, kernel, types | {"N": "i32"}, {"H": 8, "BLOCK": 1024}))
    strides = "stride_{0}b stride_{0}t stride_{0}h"
    for kind, S in (("bf16", 128), ("fp32", 96)):
        block, rows = preparation.tile(S)
        constants: dict[str, Any] = {"HV": 12, "S": S, "BS": block, "BR": rows, "UNIT": True}
        constants["BM"] = preparation.STEPS
        common = typed(f"*{kind}", "q_unit k_unit beta") | {"inverse": "*fp32", "factor": "fp32"}
        common |= typed("i32", "T N M " + strides.format("b"))
        every = " ".join(strides.format(x) for x in "qk")
        types = typed(f"*{kind}", "q k") | {"step": "*fp32"} | typed("i32", every)
        specs += [
            CompileSpec(
                f"preparation {kind} S={S}",
                preparation.preparation_kernel,
                common | types,
                constants | {"H": 12, "SIGMOID": True},
            ),
            CompileSpec(
                f"preparation_grad {kind} S={S}",
                preparation.preparation_grad_kernel,
                common | typed(f"*{kind}", "dq dk") | {"d_step": "*fp32"},
                constants,
            ),
        ]
    for kind, S, decays in (
        ("bf16", 64, ""), ("fp32", 64, ""), ("bf16", 128, " gated"), ("bf16", 128, " channels"),
    ):  # fmt: skip
        varlen, gated = kind == "fp32", bool(decays)
        columns, warps = fused_recurrent.tiles_for(S, 256 if varlen else 1024)
        specs += [
            CompileSpec(
                f"fused_recurrent {kind}" + (f" S={S}{decays}" if gated else ""),
                fused_recurrent.fused_recurrent_quasar_fwd_kernel,
                typed(f"*{kind}", "q k v o")
                | typed("*fp32", "beta initial_state final_state")
                | ({"g": "*fp32"} if gated else {})
                | typed("i32", "T " + " ".join(strides.format(x) for x in "qkv"))
                | {"scale": "fp32"}
                | ({"cu_seqlens": "*i64"} if varlen else {}),
                {"H": 8, "S": S, "BS": S, "BV": columns, "IS_VARLEN": varlen}
                | {"HAS_INITIAL": True, "STORE_FINAL": True, "READ_STEP": gated}
                | {"GROUP": 2 if gated else 1, "CHANNELS": decays == " channels"}
                | ({} if gated else {"g": None})
                | ({} if varlen else {"cu_seqlens": None}),
                num_warps=warps,
                num_stages=1,
            )
        ]
    return specs


def _layer_specs() -> list[CompileSpec]:
    from fla.ops.quasar.layer import first_tokens, gate_and_norm
    from fla.ops.quasar.layer import gradients as layer_grads
    from fla.ops.quasar.layer import kernels as layer_kernels

    specs = [
        CompileSpec(
            f"gate_and_norm bf16 S={S}",
            gate_and_norm.gate_and_norm_kernel,
            typed("*bf16", "o narrow gate_weight gate_bias y")
            | {"norm_weight": "*fp32", "R": "i32", "stride_n": "i32", "eps": "fp32"},
            {"H": 8, "S": S, "BS": S, "BR": gate_and_norm.ROWS, "HEADS": 8},
            num_warps=gate_and_norm.WARPS,
            num_stages=1,
        )
        for S in (64, 128)
    ]
    inputs = typed("*fp32", "x q_weight k_weight v_weight q_taps k_taps v_taps")
    tile = {"D": 512, "C": 512, "BD": 64, "BC": first_tokens.CHANNELS}
    for packed in (False, True):
        for sequences in (first_tokens.FEW, first_tokens.MANY):
            types = inputs | {"qkv": "*bf16", "N": "i32", "T": "i32"}
            types |= {"bounds": "*i32"} if packed else {}
            constants = tile | {"BN": sequences, "PACKED": packed}
            constants |= {} if packed else {"bounds": None}
            name = f"first_tokens bf16 {sequences}{' packed' if packed else ''}"
            kernel = first_tokens.first_tokens_kernel
            specs.append(CompileSpec(name, kernel, types, constants, num_stages=2))
    types = inputs | typed("*bf16", "q k v") | typed("i32", "halo tokens stride")
    halo = first_tokens.halo_tokens_kernel
    specs.append(CompileSpec("halo_tokens bf16", halo, types, tile, num_stages=2))
    for kind in ("bf16", "fp32"):
        packed = kind == "fp32"
        optional = {"bias": "*fp32", "position": "*i32"}
        specs += [
            CompileSpec(
                f"causal_conv_silu {kind}",
                layer_kernels.causal_conv_silu_kernel,
                typed(f"*{kind}", "x y")
                | {"weight": "*fp32", "T": "i32", "stride_x": "i32"}
                | (optional if packed else {}),
                {"C": 1536, "ROWS": 64, "BC": 512, "HAS_BIAS": packed, "PACKED": packed}
                | ({} if packed else dict.fromkeys(optional)),
            ),
            CompileSpec(
                f"gated_rmsnorm {kind}",
                layer_kernels.gated_rmsnorm_kernel,
                typed(f"*{kind}", "x gate y") | {"weight": "*fp32", "R": "i32", "eps": "fp32"},
                {"S": 64, "BS": 64, "BR": 32},
                num_warps=2,
            ),
            CompileSpec(
                f"conv_silu_grad {kind}",
                layer_grads.conv_silu_grad_kernel,
                typed(f"*{kind}", "x dy_0 dy_1 dy_2 dx")
                | typed("*fp32", "weight sums")
                | typed("i32", "T ROWS stride_x stride_dx")
                | (optional if packed else {}),
                {"C": 1536, "N": 512, "BC": 256, "HAS_BIAS": packed, "PACKED": packed}
                | {"largest": None}
                | ({} if packed else dict.fromkeys(optional)),
            ),
        ]
        specs += [
            CompileSpec(
                f"gated_rmsnorm_grad {kind} S={S}",
                layer_grads.gated_rmsnorm_grad_kernel,
                typed(f"*{kind}", "x gate dy y dx dgate")
                | typed("*fp32", "weight sums")
                | {"R": "i32", "TILES": "i32", "eps": "fp32"},
                {"H": 8, "S": S, "BS": S, "BR": 512 // S, "largest": None},
                num_warps=2,
            )
            for S in (64, 128)
        ]
    return specs


def _adaptive_specs() -> list[CompileSpec]:
    from fla.ops.quasar.layer import gradients, operator_inputs

    scaled = typed("*fp16", "x dy_0 dy_1 dy_2") | typed("*bf16", "dx largest")
    specs = [
        CompileSpec(
            "conv_silu_grad fp16 scaled",
            gradients.conv_silu_grad_kernel,
            scaled | typed("*fp32", "weight sums") | typed("i32", "T ROWS stride_x stride_dx"),
            {"C": 4608, "N": 1536, "BC": 256, "HAS_BIAS": False, "PACKED": False}
            | dict.fromkeys(("bias", "position")),
        ),
        CompileSpec(
            "gated_rmsnorm_grad fp16 scaled",
            gradients.gated_rmsnorm_grad_kernel,
            typed("*fp16", "x dx")
            | typed("*bf16", "gate dy y dgate largest")
            | typed("*fp32", "weight sums")
            | {"R": "i32", "TILES": "i32", "eps": "fp32"},
            {"H": 12, "S": 128, "BS": 128, "BR": 4},
            num_warps=2,
        ),
    ]
    for S, R in ((128, 128), (64, 0)):
        constants: dict[str, Any] = {"H": 12, "S": S, "BS": S, "R": R}
        constants |= {} if R else dict.fromkeys(("cos", "sin"))
        inputs = typed("*fp32", "A_log dt_bias lengths logits") | typed("i32", "N L")
        inputs |= typed("*bf16", "cos sin") if R else {}
        specs += [
            CompileSpec(
                f"operator_inputs fp16 S={S}",
                operator_inputs.operator_inputs_kernel,
                inputs
                | typed("*fp16", "q k q_unit k_unit")
                | {"step": "*fp32"}
                | typed("i32", "stride_x stride_u stride_l"),
                constants | {"BR": 2048 // S},
            ),
            CompileSpec(
                f"operator_inputs_grad fp16 S={S}",
                operator_inputs.operator_inputs_grad_kernel,
                inputs
                | typed("*fp16", "q_unit k_unit dq_unit dk_unit dq dk")
                | typed("*bf16", "d_logits largest")
                | typed("*fp32", "d_step sums")
                | typed("i32", "TILES stride_u stride_l stride_d"),
                constants | {"BR": 1024 // S},
            ),
        ]
    return specs
