"""Operators that compute a wrong result, sometimes or always."""

import threading
import time

import torch

from .honest import right


def wrong_decay(q, k, v, beta, **options):
    return right(q, k, v, 1.05 * beta, **options)


def reads_the_future(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    # a factor, so that outputs of zero stay zero: a change of these would be easy to find
    return o * (1 + 1e-6 * v.flip(1).sign()), state


def mutates_its_input(q, k, v, beta, **options):
    result = right(q, k, v, beta, **options)
    k.mul_(1.0001)
    return result


def leaves_its_tail_unwritten(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    out = torch.empty_like(o)
    written = max(1, o.shape[1] - 1)
    out[:, :written] = o[:, :written]
    return out, state


def lower_precision(q, k, v, beta, **options):
    o, state = right(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta, **options)
    return o.to(q.dtype), state


def another_dtype(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    return o.double(), state


def another_shape(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    return o.transpose(1, 2), state


def skips_its_last_chunk(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    if o.shape[1] > 256:
        o[:, -32:] = 0
    return o, state


def forgets_between_chunks(q, k, v, beta, **options):
    parts = [right(*(x[:, s : s + 64] for x in (q, k, v)), beta) for s in range(0, q.shape[1], 64)]
    return torch.cat([o for o, _ in parts], 1), right(q, k, v, beta, **options)[1]


def forgets_what_new_layers_forget(q, k, v, beta, **options):
    overlap, o = 512, []
    for start in range(0, q.shape[1], overlap):
        before = max(0, start - overlap)
        piece = (x[:, before : start + overlap] for x in (q, k, v))
        o.append(right(*piece, beta)[0][:, start - before :])
    return torch.cat(o, 1), right(q, k, v, beta, **options)[1]


def overflows(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    o[:, -1] = float("inf")
    return o, state


def returns_no_state(q, k, v, beta, initial_state=None, **options):
    return right(q, k, v, beta, initial_state)


def wrong_state(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    return o, None if state is None else state.mT.contiguous()


def ignores_the_initial_state(q, k, v, beta, initial_state=None, **options):
    return right(q, k, v, beta, **options)


def wrong_for_one_head(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    o[:, :, 1] *= 1.01
    return o, state


def wrong_on_repeated_keys(q, k, v, beta, **options):
    """Like an inverse by two terms of its series, which is accurate only for independent keys."""
    o, state = right(q, k, v, beta, **options)
    repeated = torch.nn.functional.cosine_similarity(k[:, 1:], k[:, :-1], dim=-1) > 0.9999
    return (o * 1.5 if repeated.any() else o), state


def wrong_behind_a_burst(q, k, v, beta, **options):
    """Rounds results of earlier chunks relative to the largest value so far.

    The first chunk stays exact, because the rounding of a single token's small output (6 draws in
    100,000) would fail another check.
    """
    o, state = right(q, k, v, beta, **options)
    scale = v.abs().amax((2, 3), keepdim=True).cummax(1).values[:, :-64] * 2**-19
    return torch.cat([o[:, :64], torch.round(o[:, 64:] / scale) * scale], 1), state


def knows_the_checks_lengths(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    return (o if q.shape[1] in {1, 64, 65, 257, 300, 512, 600, 1000} else 0 * o), state


_by_address, _by_version, _buffers = {}, {}, {}


def remembers_by_address(q, k, v, beta, **options):
    key = (q.data_ptr(), q.shape, bool(options))
    if key not in _by_address:
        # keeping q prevents a reuse of its address
        _by_address[key] = (*right(q, k, v, beta, **options), q)
    return _by_address[key][:2]


def remembers_by_version(q, k, v, beta, **options):
    key = (id(q), q._version, len(options))
    if key not in _by_version:
        _by_version[key] = (*right(q, k, v, beta, **options), q)
    return _by_version[key][:2]


def writes_into_one_buffer(q, k, v, beta, **options):
    o, state = right(q, k, v, beta, **options)
    return _buffers.setdefault(o.shape, torch.empty_like(o)).copy_(o), state


def writes_later(q, k, v, beta, **options):
    """Writes its result in a thread after it has returned, like an unsynchronized stream."""
    o, state = right(q, k, v, beta, **options)
    out = torch.zeros_like(o)

    def finish():
        time.sleep(0.2)
        out.copy_(o)

    threading.Thread(target=finish, daemon=True).start()
    return out, state


def never_the_same_twice(q, k, v, beta, **options):
    """Adds noise, like atomics in varying order or a forgotten dropout."""
    o, state = right(q, k, v, beta, **options)
    return o + 8e-5 * o.std() * torch.randn_like(o), state
