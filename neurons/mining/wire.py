"""Below the calls of the API: which addresses are safe, how often, and what a reply may hold."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from neurons.errors import ConfigError, Held
from neurons.mining.outcomes import ProtocolFault, ReplyLost, Unreachable

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Reply = TypeVar("Reply", bound=BaseModel)


class Limiter:
    """At most `count` requests in any `window` seconds; what comes too soon waits.

    Args:
        wait: waits that many seconds.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        count: int,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
        window: float = 60.0,
    ) -> None:
        self._sent: deque[float] = deque(maxlen=count)
        self._wait, self._clock, self._window = wait, clock, window

    def __call__(self) -> None:
        """Wait until a request may go out, and count it."""
        if len(self._sent) == self._sent.maxlen:
            self._wait(max(0.0, self._sent[0] + self._window - self._clock()))
        self._sent.append(self._clock())


def check_address(base_url: str) -> bool:
    """Return whether `base_url` is on this machine; raise ConfigError unless it is safe."""
    parts = urlsplit(base_url)
    on_loopback = parts.hostname in LOOPBACK
    if not parts.hostname or parts.username or parts.password:
        raise ConfigError(f"VALIDATOR_API_URL={base_url!r}: give an address like https://host.")
    if parts.scheme != "https" and not (parts.scheme == "http" and on_loopback):
        raise ConfigError(
            f"VALIDATOR_API_URL={base_url!r}: use https://, because every call carries a "
            "credential; http:// is for this machine only."
        )
    return on_loopback


def raise_transport(base_url: str, route: str, error: httpx.HTTPError) -> NoReturn:
    """Raise what a failure below HTTP means: untrusted, never sent, or sent without a reply."""
    said = f"{route}: {type(error).__name__}: {error}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Held(
                f"The certificate of {base_url} is not trusted ({cause.verify_message}).",
                "Check VALIDATOR_API_URL and this machine's clock; never send a credential there.",
            ) from None
        cause = cause.__cause__ or cause.__context__
    never_sent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
    if isinstance(error, never_sent):
        raise Unreachable(said) from None
    if isinstance(error, httpx.DecodingError):
        raise ProtocolFault(said) from None
    raise ReplyLost(said) from None


def parse_reply(route: str, data: bytes, reply: type[Reply]) -> Reply:
    """Return the checked message in `data`; raise ProtocolFault when it is anything else."""
    try:
        content = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        return reply.model_validate(content)
    except ValidationError as error:
        fields = ", ".join(
            f"{'.'.join(map(str, row['loc'])) or 'the reply'} ({row['type']})"
            for row in error.errors(include_input=False, include_url=False)[:3]
        )
        raise ProtocolFault(f"{route} answered with wrong fields: {fields}") from None
    except (ValueError, RecursionError):
        raise ProtocolFault(f"{route} answered with something that is not JSON") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999
        raise ValueError(f"{text} is out of range")
    return value
