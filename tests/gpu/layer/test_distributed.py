"""Groups of processes give one process's results: DDP, FSDP2, and one sequence over all ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from quasar_kernels.reference import relative_rms
from tests.gpu.groups import in_group
from tests.model import QuasarAttention, Task
from tests.quasar_kernels.layer.steps import step
from tests.training_steps import assert_same, take_steps

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# with half a batch, CUDA graphs replay SHORT, and LONG saves results for its backward pass
SHORT, LONG = Task(900, 512, 64, 8), Task(900, 4096, 64, 16)
TWO = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


@pytest.mark.parametrize(
    ("way", "world"),
    [("fsdp", 1), pytest.param("fsdp", 2, marks=TWO), pytest.param("ddp", 2, marks=TWO)],
)
@pytest.mark.parametrize("task", [SHORT, LONG], ids=["short", "long"])
def test_groups_compute_the_steps_of_one_process(way, world, task):
    wanted = take_steps(torch.device("cuda", 0), task, 512, 8, "alone")
    found = in_group(world, take_steps, task, 512, 8, way)
    assert_same(found, wanted, first=1e-5, moved=2e-2)
    if task is SHORT:
        assert wanted.graphs
        # FSDP2 may gather parameters at other addresses each time, which prevents replays
        assert found.graphs or way == "fsdp"


def slice_errors(device, lengths):
    """Return the errors of a layer over all ranks against one process, the largest of any rank.

    For each length of a sequence: a dictionary by result of a call that saves intermediate results,
    and one of a call that does not.
    """
    from fla.ops.quasar.parallel.context import build_cp_context

    torch.manual_seed(0)
    layer = QuasarAttention(512, head_dim=64, num_heads=8).to(device)
    errors = []
    for tokens in lengths:
        context = build_cp_context(torch.tensor([0, tokens], device=device), dist.group.WORLD, 4)
        begin = sum(context.lengths[: dist.get_rank()])
        own = slice(begin, begin + context.lengths[dist.get_rank()])
        x, dy = torch.randn(2, 1, tokens, 512, device=device).unbind()
        wanted = step(layer, x, dy, BF16)
        for name in "xy":
            wanted[name] = wanted[name][:, own]
        errors.append([])
        for keep in ("3072", "0"):
            os.environ["QUASAR_KEEP_MIB"] = keep
            found = step(layer, x[:, own], dy[:, own], BF16, cp_context=context)
            for grad in (grad for name, grad in found.items() if name not in "xy"):
                dist.all_reduce(grad)
            worst = [relative_rms(result, wanted[name]) for name, result in found.items()]
            largest = torch.tensor(worst, device=device, dtype=torch.float64)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            errors[-1].append(dict(zip(found, largest.tolist(), strict=True)))
        assert torch.equal(replayed(layer, x[:, own], context), found["y"])
    return errors


def replayed(layer, x, context):
    """Return the output of a forward pass that is captured with its exchange, and replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.autocast("cuda", BF16):
        layer(x, cp_context=context)
        # NCCL's watchdog thread queries events, which a capture in the mode "global" forbids
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(x, cp_context=context)[0]
    graph.replay()
    y = y.clone()
    graph.reset()
    return y


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=TWO)])
def test_ranks_share_a_sequence(world):
    for saved, repeated in in_group(world, slice_errors, [8192, 131_172]):
        assert saved == repeated  # the results are equal bit for bit
        assert max(saved.values()) <= 2e-2, saved
