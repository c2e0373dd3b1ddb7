"""QuasarAttention against the float64 layer: values, gradients, padding, packing, caching."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from fla.layers.quasar import QuasarAttention, QuasarCache
from fla.layers.quasar_adaptive import AdaptiveQuasarAttention
from torch._subclasses.fake_tensor import FakeTensorMode

from quasar_kernels.reference import quasar_layer, relative_rms
from tests.quasar_kernels.inputs import without_memory
from tests.quasar_kernels.layer.steps import exact_step, step

D, H, S = 48, 3, 16
SIZES = {"hidden_size": D, "head_dim": S, "num_heads": H}
kinds = pytest.mark.parametrize("kind", [QuasarAttention, AdaptiveQuasarAttention])


def layer(**options):
    return QuasarAttention(**SIZES, **options)


def reference(module, x):
    return quasar_layer(module.state_dict(), x, num_heads=H, head_dim=S)


@pytest.mark.parametrize("options", [{}, {"use_short_conv": False}, {"conv_bias": True}])
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_output_and_gradients_match_float64(options, mode):
    module = layer(mode=mode, **options)
    x, dy = torch.randn(2, 2, 130, D)
    assert module(x)[1:] == (None, None)  # no attention maps and no cache
    results, expected = step(module, x, dy), exact_step(module, x, dy)
    for name, exact in expected.items():
        assert relative_rms(results[name], exact) <= 1e-5, name


def test_autocast_sets_the_dtype_of_the_output():
    module, (x, dy) = layer(), torch.randn(2, 1, 200, D)
    results, expected = step(module, x, dy, torch.bfloat16), exact_step(module, x, dy)
    assert results["y"].dtype == torch.bfloat16
    assert relative_rms(results["y"], expected["y"]) <= 2e-2
    assert results["x"].dtype == torch.float32
    assert relative_rms(results["x"], expected["x"]) <= 4e-2


def test_only_the_input_and_the_weights_are_saved_for_the_backward_pass():
    module, x = layer(), torch.randn(1, 300, D)
    known = {p.data_ptr() for p in module.parameters()} | {x.data_ptr()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    assert saved
    assert {t.data_ptr() for t in saved} <= known


def test_padding_changes_no_result_and_its_output_is_zero():
    module, x = layer(), torch.randn(4, 60, D, requires_grad=True)
    mask = torch.ones(4, 60, dtype=torch.long)
    mask[0, :25] = 0
    mask[1, 40:] = 0
    mask[3] = 0
    y = module(x, attention_mask=mask)[0]
    assert relative_rms(y[0, 25:], reference(module, x[:1, 25:])[0]) <= 1e-5
    assert relative_rms(y[1, :40], reference(module, x[1:2, :40])[0]) <= 1e-5
    assert relative_rms(y[2], reference(module, x[2:3])[0]) <= 1e-5
    assert not y[0, :25].any()
    assert not y[1, 40:].any()
    assert not y[3].any()
    cache = module(x, attention_mask=mask, use_cache=True)[2]
    assert not cache[0]["recurrent_state"][3].any()
    y.sum().backward()
    assert not x.grad[0, :25].any()
    assert x.grad[0, 25:].all(-1).all()


@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("trained", ["q_proj.weight", "beta_log", "o_proj.weight"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (2, 5)])
def test_gradients_without_tokens_are_zero(mode, trained, shape):
    module = layer(mode=mode).requires_grad_(False)
    parameter = module.get_parameter(trained).requires_grad_()
    y = module(torch.randn(*shape, D), attention_mask=torch.zeros(shape))[0]
    y.sum().backward()
    assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_packed_sequences_are_independent():
    module, x = layer(), torch.randn(1, 100, D)
    cu = torch.tensor([0, 0, 2, 2, 70, 100], dtype=torch.int32)
    y = module(x, cu_seqlens=cu)[0]
    for start, stop in ((0, 2), (2, 70), (70, 100)):
        assert relative_rms(y[:, start:stop], reference(module, x[:, start:stop])) <= 1e-5


def test_caches_pickled_by_earlier_versions_are_loaded():
    module, x = layer(), torch.randn(2, 20, D)
    with torch.no_grad():
        _, _, cache = module(x[:, :10], use_cache=True)
        new = pickle.dumps(cache, protocol=2)
        old = new.replace(b"cfla.ops.quasar.layer.states\n", b"cfla.layers.quasar\n")
        assert old != new
        y = module(x[:, 10:], past_key_values=pickle.loads(old))[0]  # noqa: S301 # made here
    assert relative_rms(y, reference(module, x)[:, 10:]) <= 1e-5


def test_padded_prompts_are_decoded_like_unpadded_ones():
    module, x = layer(), torch.randn(2, 40, D)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    with torch.no_grad():
        y, _, cache = module(x[:, :30], attention_mask=mask[:, :30], use_cache=True)
        parts = [y]
        for t in range(30, 40):
            token, known = x[:, t : t + 1], mask[:, : t + 1]
            parts.append(module(token, known, past_key_values=cache, use_cache=True)[0])
    y = torch.cat(parts, 1)
    assert relative_rms(y[0, 13:], reference(module, x[:1, 13:])[0]) <= 1e-5
    assert relative_rms(y[1], reference(module, x[1:])[0]) <= 1e-5


def test_without_use_cache_the_cache_does_not_change():
    module, x = layer(), torch.randn(1, 20, D)
    with torch.no_grad():
        _, _, cache = module(x[:, :10], use_cache=True)
        before = cache[0]["recurrent_state"].clone()
        y = module(x[:, 10:], past_key_values=cache)[0]
    assert relative_rms(y, reference(module, x)[:, 10:]) <= 1e-5
    assert torch.equal(cache[0]["recurrent_state"], before)


LONG = [128, 1, 3, 64, 17, 187]


@pytest.mark.parametrize(
    ("options", "lengths", "dtype", "limit"),
    [
        ({}, [0, *[1] * 20, 5], torch.float32, 1e-5),
        ({"use_short_conv": False}, [50, *[1] * 20, 5], torch.float32, 1e-5),
        ({"layer_idx": 1}, LONG, torch.float32, 1e-5),
        ({}, LONG, torch.bfloat16, 2e-2),
        ({"mode": "fused_recurrent"}, LONG, torch.float32, 1e-5),
        ({"mode": "fused_recurrent"}, LONG, torch.bfloat16, 2e-2),
    ],
)
def test_several_calls_with_a_cache_give_the_result_of_one_call(options, lengths, dtype, limit):
    module, x = layer(**options), torch.randn(2, sum(lengths), D)
    cache, parts = QuasarCache(), []
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        whole = module(x)[0]
        for part in x.split(lengths, dim=1):
            y, _, cache = module(part, past_key_values=cache, use_cache=True)
            parts.append(y)
    y, expected = torch.cat(parts, 1), reference(module, x)
    assert y.dtype == dtype
    assert relative_rms(y, expected) <= limit
    # the error does not grow towards the end
    bound = 1.2 * relative_rms(whole[:, -100:], expected[:, -100:]) + 1e-6
    assert relative_rms(y[:, -100:], expected[:, -100:]) <= bound
    assert cache[options.get("layer_idx", 0)]["seen_tokens"] == sum(lengths)


def test_decoding_overwrites_only_states_that_layers_have_stored():
    module, x = layer(), torch.randn(1, 20, D)

    def decode(cache):
        before = states_of(cache)
        y = module(x[:, 10:11], past_key_values=cache, use_cache=True)[0]
        return y, {a is b for a, b in zip(states_of(cache), before, strict=True)}

    def states_of(cache):
        return cache[0]["recurrent_state"], *cache[0]["conv_state"]

    with torch.no_grad():
        _, _, cache = module(x[:, :10], use_cache=True)
        external = QuasarCache()
        states = [state.clone() for state in states_of(cache)]
        external.update(states[0], tuple(states[1:]), 0, 10)
        copies = [state.clone() for state in states]
        branch = copy.deepcopy(cache)
        results = [decode(cache), decode(external), decode(branch)]
        assert [same for _, same in results] == [{True}, {False}, {True}]
        assert all(torch.equal(a, b) for a, b in zip(states, copies, strict=True))
        for each in (cache, external, branch):
            rest = module(x[:, 11:], past_key_values=each)[0]
            assert relative_rms(rest, reference(module, x)[:, 11:]) <= 1e-5
    for y, _ in results:
        assert relative_rms(y, reference(module, x)[:, 10:11]) <= 1e-5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_and_its_original_continue_separately(copied):
    module, x = layer(), torch.randn(1, 20, D)
    exact = reference(module, x)
    with torch.no_grad():
        _, _, cache = module(x[:, :10], use_cache=True)
        module(x[:, 10:11], past_key_values=cache, use_cache=True)
        branch = copied(cache)
        for each in (cache, branch):
            for t in (11, 12):
                y = module(x[:, t : t + 1], past_key_values=each, use_cache=True)[0]
                assert relative_rms(y, exact[:, t : t + 1]) <= 1e-5


@pytest.mark.parametrize(
    ("first", "dtype"), [(torch.no_grad, torch.float16), (torch.inference_mode, torch.bfloat16)]
)
def test_decoding_may_change_grad_mode_and_dtype(first, dtype):
    module, x = layer(), torch.randn(2, 20, D)
    with first(), torch.autocast("cpu", torch.bfloat16):
        y, _, cache = module(x[:, :12], use_cache=True)
    parts = [y.clone()]
    with torch.no_grad(), torch.autocast("cpu", dtype):
        for t in range(12, 20):
            parts.append(module(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
    assert cache[0]["conv_state"][0].dtype == dtype
    y = torch.cat([part.float() for part in parts], 1)
    assert relative_rms(y, reference(module, x)) <= 2e-2


def test_decoding_does_not_overwrite_a_state_that_a_backward_pass_needs():
    module, x = layer(), torch.randn(1, 12, D)
    with torch.no_grad():
        _, _, cache = module(x[:, :10], use_cache=True)
        branch = copy.deepcopy(cache)
    y = module(x[:, 10:11], past_key_values=cache)[0]
    with torch.no_grad():
        module(x[:, 10:11], past_key_values=cache, use_cache=True)
    y.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x[:, 10:11], past_key_values=branch)[0].sum().backward()
    for g, p in zip(gradients, module.parameters(), strict=True):
        assert torch.equal(g, p.grad)


def test_the_layer_can_be_compiled():
    module, (x, dy) = layer(), torch.randn(2, 1, 30, D)
    plain, compiled = step(module, x, dy), step(torch.compile(module, backend="eager"), x, dy)
    for name, gradient in compiled.items():
        expected = plain[name.removeprefix("_orig_mod.")]
        assert relative_rms(gradient, expected.double()) <= 1e-5


def test_fake_tensors_have_the_shapes_of_outputs_and_gradients():
    with FakeTensorMode():
        module, x = layer(), torch.randn(2, 70, D)
        y = module(x)[0]
        y.sum().backward()
    assert y.shape == x.shape
    assert all(p.grad.shape == p.shape for p in module.parameters())


def test_second_derivatives_are_refused():
    x = torch.randn(1, 6, D, requires_grad=True)
    y = layer()(x)[0]
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + dx.square().sum()).backward()


@kinds
def test_tensors_without_memory_are_refused(kind):
    module = kind(D, 16, 1)
    for name, x in without_memory((2, 5, D)).items():
        with pytest.raises(ValueError, match=f"hidden_states is a {name}: pa"):
            module(x)


def test_bad_arguments_are_refused():
    module, x = layer(), torch.randn(2, 4, D)
    for shape in ((2, 4, 4), (2, 3), (1, 4), (3, 4)):
        with pytest.raises(ValueError, match="padding mask"):
            module(x, attention_mask=torch.ones(shape))
    additive = torch.tensor([[0.0, 0, 0, 0], [-torch.inf, -torch.inf, 0, 0]])
    with pytest.raises(ValueError, match="it must be 0 for padding and 1 for tokens"):
        module(x, attention_mask=additive)
    module(x, attention_mask=torch.ones(2, 4))
    bounds = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="cu_seqlens"):
        module(x[:1], attention_mask=torch.ones(1, 4), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="B must be 1; got B = 2"):
        module(x, cu_seqlens=bounds)
    for wrong in ([0, 3], [0, 6], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="from 0 to T = 4"):
            module(x[:1], cu_seqlens=torch.tensor(wrong))
    for wrong in ([0, 4], bounds.float(), bounds[None]):
        with pytest.raises(ValueError, match="int32 or int64 tensor"):
            module(x[:1], cu_seqlens=wrong)
    for shape in ((4, D), (1, 4, 2 * D)):
        with pytest.raises(ValueError, match="hidden_states must have shape"):
            module(torch.randn(shape))


@kinds
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"num_v_heads": 2 * H}, f"no argument num_v_heads (only {H} is supported)"),
        ({"expand_v": 2.0}, "no argument expand_v (only 1 is supported)"),
        ({"allow_neg_eigval": True}, "no argument allow_neg_eigval (only False is supported)"),
        ({"head_dims": 8}, "no argument head_dims (did you mean head_dim?)"),
        ({"use_gate": False}, "no argument use_gate"),
        ({"mode": "parallel"}, "mode must be 'chunk' or 'fused_recurrent'; got 'parallel'"),
        ({"norm_eps": -1.0}, "norm_eps must be a finite number from 0; got -1.0"),
        ({"conv_size": 0}, "conv_size must be a whole number from 1; got 0"),
        ({"layer_idx": -1}, "layer_idx must be the layer's place, from 0; got -1"),
        *(({n: -4}, f"{n} must be a whole number from 1; got -4") for n in SIZES),
    ],
)
def test_unknown_or_impossible_settings_are_refused(kind, option, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        kind(**SIZES | option)


@kinds
def test_settings_that_request_nothing_and_numpy_s_integers_are_accepted(kind):
    kind(**SIZES, expand_v=1.0, num_v_heads=None, allow_neg_eigval=False, fuse_norm=None)
    kind(**SIZES, num_v_heads=H, allow_neg_eigval=None)
    kind(*np.array([D, S, H]))


def test_unknown_arguments_of_a_call_are_refused():
    module, x = layer(), torch.randn(1, 10, D)
    bounds = torch.tensor([0, 4, 10])
    for name, value, hint in (
        ("cu_seqlen", bounds, "did you mean cu_seqlens?"),
        ("cu_seq_lens_q", bounds, "did you mean cu_seqlens?"),
        ("seq_idx", torch.zeros(1, 10), "did you mean cu_seqlens?"),
        ("padding_mask", torch.zeros(1, 10), "did you mean attention_mask?"),
        ("cache_params", QuasarCache(), "did you mean past_key_values?"),
        ("initial_state", torch.zeros(1, H, S, S), "omit it"),
    ):
        words = f"QuasarAttention.forward has no argument {name} ({hint})"
        with pytest.raises(ValueError, match=re.escape(words)):
            module(x, **{name: value})
    ignored = {"position_ids": torch.arange(10)[None], "num_items_in_batch": 5, "seq_idx": None}
    assert torch.equal(module(x, **ignored)[0], module(x)[0])


@torch.no_grad()
def test_layers_without_a_place_cannot_share_a_cache():
    x = torch.randn(1, 10, D)
    for first, second in ((None, None), (None, 0), (0, None)):
        cache, one, other = QuasarCache(), layer(layer_idx=first), layer(layer_idx=second)
        one(x, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="two layers use place 0 of the cache"):
            other(x, past_key_values=cache, use_cache=True)
        one(x, past_key_values=cache, use_cache=True)
        other(x, past_key_values=copy.deepcopy(cache), use_cache=True)  # a copy has no user yet
    cache = type("Cache", (list,), {})()
    with pytest.raises(ValueError, match="construct it with layer_idx"):
        layer()(x, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("options", [{}, {"use_short_conv": False}])
def test_another_number_of_sequences_with_a_cache_is_refused(tokens, options):
    module, x = layer(**options), torch.randn(2, 70, D)
    with torch.no_grad():
        cache = module(x[:, :30], use_cache=True)[2]
        bounds = torch.tensor([0, 10, 20, 30 + tokens])
        packed = torch.randn(1, 30 + tokens, D)
        for call, count in (
            ({"hidden_states": x[:1, 30 : 30 + tokens]}, 1),
            ({"hidden_states": x.repeat(2, 1, 1)[:, 30 : 30 + tokens]}, 4),
            ({"hidden_states": packed, "cu_seqlens": bounds}, 3),
        ):
            with pytest.raises(
                ValueError, match=f"states of 2 sequences, and this call has {count}"
            ):
                module(**call, past_key_values=cache, use_cache=True)
        # a caller repeats the states without copying them
        for name, state in list(cache[0].items()):
            if isinstance(state, torch.Tensor):
                cache[0][name] = state[:1].expand(3, *state.shape[1:])
            elif isinstance(state, tuple):
                cache[0][name] = tuple(s[:1].expand(3, *s.shape[1:]) for s in state)
        following = torch.randn(3, tokens, D)
        y = module(following, past_key_values=cache, use_cache=True)[0]
    for row in range(3):
        whole = torch.cat([x[:1, :30], following[row : row + 1]], 1)
        assert relative_rms(y[row : row + 1], reference(module, whole)[:, 30:]) <= 1e-5
