"""Compiled models give the gradients of uncompiled ones."""

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import graphs as layer_graphs

from benchmarks.models.model import Model, recall_loss
from benchmarks.models.task import Task, draw
from benchmarks.models.ways import prepare
from quasar_kernels.reference import relative_rms

pytestmark = pytest.mark.gpu

SHORT, LONG = Task(900, 512, 64, 8), Task(900, 4096, 64, 8)


def gradients(task, way, backend="inductor"):
    """Return the loss and the gradients by name, after calls that capture graphs."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Model(task.vocabulary, 512, 8).cuda()
    prepared = prepare(model, way, device, backend)
    batch = draw(task, 0, device)
    for _ in range(3):
        model.zero_grad()
        loss = recall_loss(prepared.call(batch.tokens, batch.places), batch.answers)
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("task", [SHORT, LONG], ids=lambda task: str(task.tokens))
def test_compiled_models_give_the_same_gradients(task):
    wanted = gradients(task, "bf16")
    for name, gradient in gradients(task, "compiled", "eager").items():
        assert torch.equal(gradient, wanted[name]), name
    for name, gradient in gradients(task, "compiled").items():
        # torch's fused operations around the layers round less often
        assert relative_rms(gradient, wanted[name]) <= 5e-2, name


def test_compiled_layers_are_replayed():
    layer = QuasarAttention(512, head_dim=64, num_heads=8).cuda()
    compiled, x = torch.compile(layer), torch.randn(1, 300, 512, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        wanted = [layer(x)[0] for _ in range(3)][-1]
        found = [compiled(x)[0] for _ in range(3)]
    assert all(torch.equal(y, wanted) for y in found)
    assert len(layer_graphs._owners[layer]) == 1
