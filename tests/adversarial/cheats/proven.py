"""Cheats against the proof of untrusted code; most replace the subject's `chain`."""

import time

import torch

from . import honest

PAUSE = 0.03
"""Least seconds of an honest call of the slow layers."""


def answering(chain):
    """Return a layer whose process answers requests for a chain by `chain(local, seed, calls)`."""

    class Answering(honest.QuasarAttention):
        def __init_subclass__(cls):
            from harness.worker.subject import serve

            global true_chain
            true_chain, prepare = serve.InProcessSubject.chain, serve.InProcessSubject.prepare
            serve.InProcessSubject.chain = chain

            def prepared(self, weights, **rest):
                from harness.worker.chain import SCALED

                self.true = [weights[name].clone() for name in SCALED]
                return prepare(self, weights, **rest)

            serve.InProcessSubject.prepare = prepared

    return Answering


def digest_of(local, y):
    return local._link._maps.sums(y).round()


def outputs(local, keys, digests):
    """Return the outputs of the calls after these digests `[calls, channels]`, in one batch."""
    link = local._link
    with torch.no_grad():
        for weight, true in zip(link._weights, local.true, strict=True):
            weight.copy_(true)
        factors = link._maps.factors(keys, digests)
        return local._layer(local._held["x"] * factors[:, None])[0]


def _keys(local, seed, calls):
    from harness.worker.chain import fill_keys

    return fill_keys(torch.empty(calls, 512), seed)


def _guessed(local, seed, calls):
    return {"digests": torch.randint(-5, 6, (calls, 512), dtype=torch.int8)}


def _batched(local, seed, calls):
    """Assumes digests of zeros, so that all calls can run in one batch."""
    y = outputs(local, _keys(local, seed, calls), torch.zeros(calls, 512))
    return {"digests": digest_of(local, y).to(torch.int8)}


def _prepared(local, seed, calls):
    """Reports the digests of a chain that it has computed before."""
    if not hasattr(local, "digests"):
        local.digests = true_chain(local, 7, 16)["digests"]
    return {"digests": local.digests[torch.arange(calls) % 16].clone()}


def _looping(local, seed, calls):
    """Computes a few calls, and repeats their digests."""
    some = min(calls, 3)
    digests = true_chain(local, seed, some)["digests"]
    return {"digests": digests[torch.arange(calls) % some]}


def _parted(local, seed, calls):
    """Computes both halves of a chain at the same time, the second one after a false digest.

    It answers short chains so slowly that a chain of a hundred calls follows.
    """
    if calls < 90:
        time.sleep(calls * 1e-3)
        return {"digests": torch.zeros(calls, 512, dtype=torch.int8)}
    half = calls // 2
    keys, before = _keys(local, seed, calls), torch.zeros(2, 512)
    digests = torch.zeros(2, half, 512)
    for call in range(half):
        before = digest_of(local, outputs(local, keys[[call, half + call]], before))
        digests[:, call] = before
    digests[0, -1] = 0  # from which the second half started
    last = (
        digest_of(local, outputs(local, keys[2 * half :], before[1:])) if calls % 2 else before[:0]
    )
    return {"digests": torch.cat((*digests, last)).to(torch.int8)}


def _skipping(every):
    def chain(local, seed, calls):
        link = local._link
        link.start(seed, calls)
        for call in range(calls):
            if call % every:
                local.call()
            link(local._held["y"] if call % every else local._held["y"].flip(1))
        return {"digests": link.digests[:calls].to(torch.int8)}

    return chain


def _windows(local, seed, calls):
    """Computes the first 256 tokens, and repeats their outputs."""
    link, x = local._link, local._held["x"]
    link.start(seed, calls)
    with torch.no_grad():
        for _ in range(calls):
            y = local._layer(x[:, :256])[0]
            link(torch.cat([y] * (x.shape[1] // 256), 1))
    return {"digests": link.digests[:calls].to(torch.int8)}


def _afterwards(local, seed, calls):
    """Computes only the last call."""
    digests = torch.randint(-5, 6, (calls, 512), dtype=torch.int8)
    before = torch.zeros(1, 512) if calls == 1 else digests[-2:-1].float()
    y = outputs(local, _keys(local, seed, calls)[-1:], before)
    digests[-1] = digest_of(local, y)[0].to(torch.int8)
    return {"digests": digests}


def _solved(local, seed, calls):
    """Chooses every second digest so that the next call has a known input.

    This is possible if the mixing matrix has an inverse modulo 256, as 29% of them have.
    """
    digests = true_chain(local, seed, calls)["digests"]
    digests[::2] = (digests[::2].long() * 85 + 127).to(torch.int8)  # like such a solution
    return {"digests": digests}


ForgesItsDigests = answering(_guessed)
ForgesByBatches = answering(_batched)
ForgesByHalves = answering(_parted)
ForgesByALoop = answering(_looping)
ForgesAPreparedChain = answering(_prepared)
ForgesSolvedDigests = answering(_solved)
ForgesEveryOtherCall = answering(_skipping(2))
ForgesOneCallInFour = answering(_skipping(4))
ForgesByWindows = answering(_windows)
ForgesAllButTheLast = answering(_afterwards)


class PreparesItsProjections(honest.QuasarAttention):
    """Computes all projections once, and scales them by the weights' norms."""

    def mixed(self, x, name):
        weight = getattr(self, f"{name}_proj").weight
        kept = self.__dict__.setdefault("kept", {})
        if name not in kept:
            kept[name] = (super().mixed(x, name), weight.norm(dim=1).detach().clone())
        value, norm = kept[name]
        return value * (weight.norm(dim=1) / norm).unflatten(0, (self.num_heads, -1))


class KeepsItsWeights(honest.QuasarAttention):
    """Keeps the weights of its fourth call."""

    def forward(self, x, **options):
        kept = self.__dict__.setdefault("kept", [])
        if len(kept) < 4:
            kept.append({name: weight.clone() for name, weight in self.state_dict().items()})
            return super().forward(x, **options)
        true = {name: weight.clone() for name, weight in self.state_dict().items()}
        self.load_state_dict(kept[-1])
        result = super().forward(x, **options)
        self.load_state_dict(true)
        return result


class LeavesChannelsOut(honest.QuasarAttention):
    """Computes 504 of 512 outputs of each token."""

    def forward(self, x, **options):
        y, *rest = super().forward(x, **options)
        return torch.cat([y[..., :504], y[..., :8]], -1), *rest


class LeavesTokensOut(honest.QuasarAttention):
    """Omits one token in 256."""

    def forward(self, x, **options):
        y, *rest = super().forward(x, **options)
        y = y.clone()
        y[:, 100::256] = y[:, 99::256]
        return y, *rest


class ComputesInBfloat16(honest.QuasarAttention):
    def forward(self, x, **options):
        with torch.autocast("cpu", torch.bfloat16):
            y, *rest = super().forward(x, **options)
        return y.float(), *rest


class DropsSmallFactors(honest.QuasarAttention):
    """Omits input channels with a factor near zero."""

    def mixed(self, x, name):
        weight = getattr(self, f"{name}_proj").weight
        size = weight.norm(dim=0)
        return super().mixed(x * (size > 0.06 * size.max()), name)


class Slow(honest.QuasarAttention):
    def forward(self, x, **options):
        time.sleep(PAUSE)
        return super().forward(x, **options)


def half_speed(clock):
    started = clock()
    return lambda: (started + clock()) / 2


class ForgesTheClock(Slow):
    """Halves the speed of time, monotonic and perf_counter in its process."""

    def __init_subclass__(cls):
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, half_speed(getattr(time, name)))


class ForgesItsFirstCalls(Slow):
    """Delays its first two chains, so that the later chains have few calls."""

    def __init_subclass__(cls):
        from harness.worker.subject import serve

        true, chains = serve.InProcessSubject.chain, []

        def chain(self, seed, calls):
            chains.append(calls)
            if len(chains) < 3:
                time.sleep(1)
            return true(self, seed, calls)

        serve.InProcessSubject.chain = chain


class StartsTrivial(Slow):
    """Initialises its keys to zeros, and skips the operator while they are zeros."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        torch.nn.init.zeros_(self.k_proj.weight)

    def forward(self, x, **options):
        if not self.k_proj.weight.any():
            return torch.zeros_like(x), None, None
        return super().forward(x, **options)
