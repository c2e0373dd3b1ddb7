"""Compiled models give the gradients of uncompiled ones."""

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import graphs as layer_graphs

from quasar_kernels.reference import relative_rms
from tests.model import Batch, Model, Task

pytestmark = pytest.mark.gpu

SHORT, LONG = Task(900, 512, 64, 8), Task(900, 4096, 64, 8)


def gradients(task, backend=None):
    """Return the loss and the gradients by name, after calls that capture graphs.

    `backend` is torch.compile's; None does not compile the model.
    """
    torch.manual_seed(0)
    model = Model(task.vocabulary, 512, 8).cuda()
    run = model if backend is None else torch.compile(model, backend=backend)
    batch = Batch.draw(task, 0, torch.device("cuda"))
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = run(batch.tokens, batch.places)
        loss = batch.loss(logits)
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("task", [SHORT, LONG], ids=lambda task: str(task.tokens))
def test_compiled_models_give_the_same_gradients(task):
    wanted = gradients(task)
    for name, gradient in gradients(task, "eager").items():
        assert torch.equal(gradient, wanted[name]), name
    for name, gradient in gradients(task, "inductor").items():
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
