"""Bodies of replies: checked and parsed in bounded memory, because any server may be hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from neurons.wire.outcomes import ProtocolFault, TooLarge

ENCODING = "identity"
"""The only content encoding that requests accept: a compressed body could fill the memory."""
FREE_NODES, BYTES_PER_NODE = 1000, 8
"""A reply may have this many JSON values, and one more for each BYTES_PER_NODE bytes: in memory, an
empty list takes 30 times the size of its text."""

Reply = TypeVar("Reply", bound=BaseModel)
Each = Callable[[dict[str, Any]], object]


def check_encoding(route: str, headers: Mapping[str, str]) -> None:
    """Raise ProtocolFault for an encoded body, before any of it is read."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", ENCODING):
        raise ProtocolFault(f"{route} answered with the encoding {encoding[:40]!r}")


def check_size(route: str, size: int, limit: int) -> None:
    """Raise TooLarge for a body of more than `limit` bytes."""
    if size > limit:
        raise TooLarge(f"{route} answered with more than {limit} bytes")


def parse_reply(route: str, data: bytes, reply: type[Reply], each: Each | None = None) -> Reply:
    """Return the validated message in `data`; raise ProtocolFault if it is not one.

    `each` replaces every JSON object as soon as it is parsed. It keeps only a number of another
    miner's row, so such rows take little memory and cannot make the reply invalid. NaN and Infinity
    are rejected without `each`, and accepted with it.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > FREE_NODES + len(data) // BYTES_PER_NODE:
        raise TooLarge(f"{route} answered with too many JSON values")
    try:
        if each is None:
            content = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        else:
            content = json.loads(data, object_hook=each)
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
