"""The operators in graphs of torch.compile on a GPU: the bits of the plain calls."""

import pytest
import torch

from tests.quasar_kernels.delta_rule.calls import chunk, inputs, recurrent
from tests.quasar_kernels.inputs import packed

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _without_earlier_graphs():
    torch.compiler.reset()


@pytest.mark.parametrize("K", [64, 128, 48])
def test_a_training_step_with_packed_sequences(K):
    found = []
    for call in (chunk, torch.compile(chunk, fullgraph=True, dynamic=True)):
        torch.manual_seed(0)
        for lengths in ([700, 1, 300], [64, 2000]):
            x = inputs(sum(lengths), K=K, dtype=torch.bfloat16, device="cuda")
            for y in x:
                y.requires_grad_()
            more = {"cu_seqlens": packed(lengths, "cuda"), "output_final_state": True}
            o, final = call(x, True, use_qk_l2norm_in_kernel=True, **more)
            (o.float().square().sum() + final.square().sum()).backward()
            found += [o, final, *(y.grad for y in x)]
    half = len(found) // 2
    equal = [torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True)]
    assert all(equal), equal


def test_decoding_in_a_cuda_graph():
    step = torch.compile(recurrent, fullgraph=True, mode="reduce-overhead")
    states = [torch.zeros(4, 2, 64, 64, device="cuda")] * 2
    with torch.no_grad():
        for _ in range(5):
            x = inputs(1, 4, K=64, dtype=torch.bfloat16, device="cuda")
            more = {"output_final_state": True}
            found = [y.clone() for y in step(x, True, initial_state=states[0], **more)]
            expected = recurrent(x, True, initial_state=states[1], **more)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            states = [found[1], expected[1]]
