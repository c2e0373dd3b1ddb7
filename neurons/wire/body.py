"""Bodies of replies: checked and parsed in bounded memory, because any server may be hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from neurons.wire.outcomes import ProtocolFault, TooLarge

ENCODING = "identity"
"""The only content encoding that requests accept: a compressed body may be a bomb."""
FREE_NODES, BYTES_PER_NODE = 1000, 8
"""Number of JSON values that any text may have, and the bytes that each further one needs on
average. An empty list takes 30 times the memory of its text."""

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

    NaN and Infinity are rejected. With `each`, which replaces every JSON object as soon as it is
    parsed, they are accepted: other miners' rows, of which `each` keeps a number, take little
    memory and cannot make the reply invalid.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > FREE_NODES + len(data) // BYTES_PER_NODE:
        raise TooLarge(f"{route} answered with too many JSON values")
    with _parsing(route):
        if each is None:
            content = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        else:
            content = json.loads(data, object_hook=each)
        return reply.model_validate(content)


@contextmanager
def _parsing(route: str) -> Iterator[None]:
    """Raise the errors of the block as a ProtocolFault that names the route."""
    try:
        yield
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
