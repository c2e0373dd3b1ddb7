"""The host code of the CUDA forward pass without a GPU: how calls are cut into segments.

test_emulated_forward.py runs it with the kernels; this file checks the rest.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan


def cut(B, T, heads=8, width=64, bounds=None, *, warps=4, blocks=4):
    """Return the segments on a GPU of 132 multiprocessors, each with room for `blocks` blocks."""
    kernel = SimpleNamespace(blocks=blocks, threads=32 * warps)
    kernels = {"segment_map": kernel, "segment_output": kernel}
    program = LoadedProgram(Variant(0, torch.bfloat16), kernels, 132, False)
    v = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(B, T, heads, width)
    return cuda_scan.cut_segments(program, v, bounds)


@pytest.mark.parametrize(
    ("shape", "options", "segments"),
    [
        ((16, 4096), {}, 1),  # 128 blocks of four warps fill 132 multiprocessors
        ((4, 4096, 16, 128), {}, 1),  # as many, two for each head
        ((8, 4096), {}, 8),  # 64 blocks do not
        ((16, 4096), {"warps": 2}, 4),  # nor do 128 blocks of two warps, on other GPUs
        ((16, 65536), {}, 4),  # pass 1 stops early in long segments
        ((24, 65536), {}, 1),
        ((1, 1_000_000), {}, 66),
    ],
)
def test_sequences_stay_whole_if_they_fill_the_gpu(shape, options, segments):
    assert cut(*shape, **options).per_sequence == segments


# of 8 blocks each; 2,048 tokens have too few segments for one round of 132
@pytest.mark.parametrize(("T", "count"), [(2048, 11), (8192, 16), (16384, 32), (32768, 32)])
def test_segments_fill_rounds_of_multiprocessors(T, count):
    assert cut(1, T).per_sequence == count


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ([4096] * 16, True),
        ([1000, 0, 64, 4096] * 16, True),
        ([65536 - 32] + [1] * 32, False),  # one sequence would run almost alone
    ],
)
def test_packed_sequences_stay_whole_if_they_fill_the_gpu(lengths, whole):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    segments = cut(1, int(bounds[-1]), bounds=bounds)
    assert (segments.total == segments.sequences) == whole
