"""Every public function on a GPU that is not the current one, and threads on two GPUs."""

import threading

import pytest
import torch
from fla.layers.quasar import QuasarAttention, QuasarCache
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar
from fla.ops.quasar.forward_substitution import quasar_forward_substitution
from fla.ops.quasar.gate import fused_quasar_gate
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm

from tests.gpu.calls import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

OTHER = 1
H, S, D = 8, 64, 512


def randn(*shape, dtype=torch.float32):
    """Draw noise on the other GPU."""
    return torch.randn(*shape, device=f"cuda:{OTHER}", dtype=dtype)


def layer_on(device, seed=0):
    """Return a layer of the size that validators time."""
    torch.manual_seed(seed)
    return QuasarAttention(hidden_size=D, head_dim=S, num_heads=H).to(device)


def recorded(outputs, leaves):
    """Return the outputs, and the gradients for output gradients of 1."""
    outputs = [x for x in outputs if x is not None]
    ones = [torch.ones_like(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, ones)]


def operator(function, T):
    """Return q, k, v, beta and a state, and a recorded call of `function` with them."""
    qkv = [randn(1, T, H, S, dtype=torch.bfloat16) * 0.1 for _ in range(3)]
    inputs = [*qkv, randn(H).abs() + 0.1, randn(1, H, S, S)]
    leaves = [x.requires_grad_() for x in inputs]
    return inputs, lambda: recorded(function(*leaves, True), leaves)


def kernels(function, *inputs):
    """Return `inputs`, and a recorded call of `function` with them."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    return inputs, lambda: recorded([function(*inputs)], leaves)


def of_gate_and_norm():
    o, narrow = randn(3000, H, S, dtype=torch.bfloat16), randn(3000, S, dtype=torch.bfloat16)
    weight, bias = randn(D, S, dtype=torch.bfloat16), randn(D, dtype=torch.bfloat16)
    inputs = (o, narrow, weight, bias, randn(S))
    return inputs, lambda: [gate_and_norm(*inputs, 1e-5)]


def layer_call(T, *, trained=False, calls=1, dtype=torch.bfloat16, batch=1, **arguments):
    """Return an input, and a function that calls a layer with it and returns the last output."""
    layer, x = layer_on(f"cuda:{OTHER}"), randn(batch, T, D)

    def run():
        with torch.autocast("cuda", dtype), torch.set_grad_enabled(trained):
            for _ in range(calls):
                y = layer(x, **arguments)[0]
        return recorded([y], list(layer.parameters())) if trained else [y]

    return (x,), run


def decoding():
    layer, x = layer_on(f"cuda:{OTHER}"), randn(4, 30, D)

    def run():
        cache, parts = QuasarCache(), [x[:, :20], *x[:, 20:].split(1, 1)]
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            ys = [layer(part, past_key_values=cache, use_cache=True)[0] for part in parts]
        return [torch.cat(ys, 1), cache[0]["recurrent_state"], *cache[0]["conv_state"]]

    return (x,), run


def packed(**arguments):
    bounds = torch.tensor([0, 100, 900], device=f"cuda:{OTHER}")
    return layer_call(900, cu_seqlens=bounds, **arguments)


ENTRIES = {
    "chunk": lambda: operator(chunk_quasar, 3000),
    "recurrent": lambda: operator(fused_recurrent_quasar, 50),
    "gate": lambda: kernels(fused_quasar_gate, randn(999, H).abs(), randn(H).abs()),
    "inverse": lambda: kernels(quasar_forward_substitution, randn(99, 32, 32) * 0.1),
    "convolution": lambda: kernels(causal_conv_silu, randn(9000, 1536), randn(1536, 4)),
    "norm": lambda: kernels(
        lambda x, gate, weight: gated_rmsnorm(x, gate, weight, 1e-5),
        randn(9000, S),
        randn(9000, S),
        randn(S),
    ),
    "gate and norm": of_gate_and_norm,
    "layer, launched": lambda: layer_call(300),
    "layer, replayed": lambda: layer_call(300, calls=4),
    "layer, trained": lambda: layer_call(300, trained=True),
    "layer, trained by replays": lambda: layer_call(300, trained=True, calls=4),
    "layer, fp16": lambda: layer_call(300, dtype=torch.float16, calls=3),
    "layer, batch": lambda: layer_call(300, batch=3, calls=3),
    "layer, packed": packed,
    "layer, packed and trained": lambda: packed(trained=True),
    "layer, padded": lambda: layer_call(
        300, attention_mask=torch.arange(300, device=f"cuda:{OTHER}")[None] > 40
    ),
    "layer, long": lambda: layer_call(40_000),
    "layer, long, trained": lambda: layer_call(40_000, trained=True),
    "layer, decoding": decoding,
}


@pytest.fixture(autouse=True)
def peers():
    """Make device 0 current. It can access the other GPU's memory, so mistakes do not raise."""
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda:0").to(f"cuda:{OTHER}").to("cuda:0")
    yield
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_current_device_does_not_matter(entry, backend, monkeypatch):
    monkeypatch.setenv("QUASAR_BACKEND", backend)
    inputs, run = ENTRIES[entry]()
    with torch.cuda.device(OTHER):
        expected = run()
        kept = [x.detach().clone() for x in inputs]
        torch.cuda.synchronize()
        poison()
        # write the inputs late: a launch on a stream that does not wait for them reads noise
        with torch.no_grad():
            for x in inputs:
                x.copy_(torch.randn_like(x, dtype=torch.float32))
            torch.cuda._sleep(20_000_000)
            for x, value in zip(inputs, kept, strict=True):
                x.copy_(value)
    found = run()
    for x, wanted in zip(found, expected, strict=True):
        assert x.device.index == OTHER
        assert torch.equal(x, wanted)


def step(layer, x):
    """Return an output and the parameters' gradients."""
    layer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)[0]
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("chosen", [True, False], ids=["set_device", "device 0 current"])
def test_a_thread_for_each_gpu(chosen):
    wrong = []
    work = []
    for device in range(2):
        layers = [layer_on(f"cuda:{device}", seed) for seed in range(2)]
        xs = [torch.randn(1, T, D, device=f"cuda:{device}") for T in (64, 300, 5000)]
        wanted = [[step(layer, x) for x in xs] for layer in layers]
        work.append((device, layers, xs, wanted))

    def walk(device, layers, xs, wanted):
        try:
            if chosen:
                torch.cuda.set_device(device)
            for _ in range(8):
                for layer, results in zip(layers, wanted, strict=True):
                    for x, result in zip(xs, results, strict=True):
                        pairs = zip(step(layer, x), result, strict=True)
                        if not all(torch.equal(a, b) for a, b in pairs):
                            wrong.append((device, x.shape[1]))
        except Exception as error:
            wrong.append((device, error))

    threads = [threading.Thread(target=walk, args=arguments) for arguments in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_moving_a_layer_to_the_other_gpu():
    layer, x = layer_on("cuda:0"), torch.randn(1, 300, D, device="cuda:0")
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        first = [layer(x)[0] for _ in range(3)][-1]
        layer.to(f"cuda:{OTHER}")
        other = [layer(x.to(f"cuda:{OTHER}"))[0] for _ in range(3)][-1]
        layer.to("cuda:0")
        again = [layer(x)[0] for _ in range(3)][-1]
    assert torch.equal(other.to("cuda:0"), first)
    assert torch.equal(again, first)


def test_tensors_on_several_gpus_are_an_error():
    inputs, _ = operator(chunk_quasar, 100)
    inputs = [x.detach() for x in inputs]
    for n in (1, 2, 3, 4):
        mixed = [x.to("cuda:0") if i == n else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match="like the other arguments"):
            chunk_quasar(*mixed)
    layer, x = layer_on("cuda:0"), randn(1, 40_000, D)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad(), pytest.raises(RuntimeError):
        layer(x)
