"""Bodies of replies: decoded and parsed in bounded memory, because any server may be hostile."""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from neurons.wire.outcomes import ProtocolFault, TooLarge

ENCODING = "gzip"
"""The only content encoding that requests accept; replies may have one layer of it."""
PIECE_BYTES = 2**16
PARSED_BYTES = 2**20
"""Limit on the bytes of a list's reply that stay in memory as objects: own rows, other members."""
VALUE_BYTES = 2**21
"""Limit on one row or other member of a list's reply."""
MAX_ROWS = 250_000
"""Limit on the rows of a list's reply; of most rows only a number stays in memory."""
FREE_NODES, BYTES_PER_NODE = 1000, 8
"""Number of JSON values that any text may have, and the bytes that each further one needs on
average. An empty list takes 30 times the memory of its text."""

Reply = TypeVar("Reply", bound=BaseModel)
Each = Callable[[dict[str, Any]], object]

_SPACE = re.compile(r"[ \t\n\r]*")


class Body:
    """Decodes one reply's body piece by piece.

    Raises TooLarge beyond `limit` decoded bytes, which it counts while it decodes, and
    ProtocolFault for another encoding, a second layer, or damaged data.
    """

    def __init__(self, route: str, headers: Mapping[str, str], limit: int) -> None:
        self._route, self._limit, self._size = route, limit, 0
        encoding = headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", ENCODING, "x-gzip"):
            raise ProtocolFault(f"{route} answered with the encoding {encoding[:40]!r}")
        gzipped = encoding not in ("", "identity")
        self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS) if gzipped else None

    def pieces(self, raw: bytes) -> Iterator[bytes]:
        """Yield the decoded content of the next bytes, in pieces of bounded size."""
        if self._gzip is None:
            yield self._counted(raw)
            return
        piece = b""
        while not self._gzip.eof and (raw or len(piece) == PIECE_BYTES):
            try:
                piece = self._gzip.decompress(raw, PIECE_BYTES)
            except zlib.error as error:
                raise self._undecodable(str(error)) from None
            raw = self._gzip.unconsumed_tail
            yield self._counted(piece)

    def end(self) -> None:
        """Raise ProtocolFault if the encoded data ended early."""
        if self._gzip is not None and not self._gzip.eof:
            raise self._undecodable("it ends early")

    def _counted(self, piece: bytes) -> bytes:
        self._size += len(piece)
        if self._size > self._limit:
            raise TooLarge(f"{self._route} answered with more than {self._limit} bytes")
        return piece

    def _undecodable(self, reason: str) -> ProtocolFault:
        return ProtocolFault(f"{self._route} answered with an undecodable body ({reason})")


def parse_reply(route: str, data: bytes, reply: type[Reply]) -> Reply:
    """Return the validated message in `data`; raise ProtocolFault if it is not one.

    NaN and Infinity are rejected.
    """
    _check_nodes(route, data, b"[", b"{", b",")
    with _parsing(route):
        content = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        return reply.model_validate(content)


def parse_lists(route: str, pieces: Iterable[bytes], reply: type[Reply], each: Each) -> Reply:
    """Return the validated message in a body with lists that may have the rows of all miners.

    `each` reduces a row as soon as it is complete, so that the rows of other miners take little
    memory and cannot make the reply invalid; they may contain NaN. Raises ProtocolFault, and
    TooLarge for too many rows or too many bytes that stay in memory.
    """
    with _parsing(route):
        lists = _Lists(route, pieces, reply.model_fields, each)
        return reply.model_validate(lists.content())


class _Lists:
    """Parses a JSON object from pieces; of its members, lists are parsed row by row."""

    def __init__(
        self, route: str, pieces: Iterable[bytes], names: Container[str], each: Each
    ) -> None:
        self._route, self._names, self._each = route, names, each
        self._pieces = _batches(codecs.iterdecode(pieces, "utf-8-sig"))
        self._text, self._at = "", 0
        self._decode = json.JSONDecoder().raw_decode
        self._rows = self._parsed = 0

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for _ in self._items("{", "}"):
            name, _ = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise ValueError("not a member of an object")
            if self._peek() == "[":
                content[name] = self._rows_of()
            else:
                member = self._value()
                content[name] = self._kept(*member) if name in self._names else None
        if self._peek():
            raise ValueError("text after the object")
        return content

    def _rows_of(self) -> list[object]:
        rows: list[object] = []
        for _ in self._items("[", "]"):
            self._rows += 1
            if self._rows > MAX_ROWS:
                raise TooLarge(f"{self._route} answered with more than {MAX_ROWS} rows")
            row, text = self._value()
            kept = self._each(row) if isinstance(row, dict) else None
            rows.append(self._kept(kept, text) if kept is row else kept)
        return rows

    def _kept(self, value: object, text: str) -> object:
        """Count a value that stays in memory, by its text."""
        self._parsed += len(text)
        if self._parsed > PARSED_BYTES:
            raise TooLarge(f"{self._route} answered with too much about this hotkey")
        return value

    def _items(self, first: str, last: str) -> Iterator[None]:
        """Yield at the begin of each item between brackets; the caller reads the item."""
        if self._next() != first:
            raise ValueError(f"{first} is missing")
        if self._peek() == last:
            self._next()
            return
        while True:
            yield
            after = self._next()
            if after == last:
                return
            if after != ",":
                raise ValueError(", is missing")

    def _value(self) -> tuple[Any, str]:
        """Parse the next value, and return it with its text."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError:
                end = len(self._text)
            if end < len(self._text):  # else it is incomplete, or a number that may continue
                text, self._at = self._text[self._at : end], end
                return value, text
            if len(self._text) - self._at > VALUE_BYTES:
                raise TooLarge(f"{self._route} answered with more than {VALUE_BYTES} bytes a row")
            if not self._more():
                raise ValueError("the text ends early")

    def _peek(self) -> str:
        """Return the next character that is not a space, or nothing at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _next(self) -> str:
        found = self._peek()
        self._at += 1
        return found

    def _more(self) -> bool:
        piece = next(self._pieces, "")
        self._text, self._at = self._text[self._at :] + piece, 0
        _check_nodes(self._route, self._text, "[", "{", ",")
        return bool(piece)


def _batches(pieces: Iterable[str]) -> Iterator[str]:
    """Join pieces until they are long enough: each one costs another try to parse a value."""
    batch = ""
    for piece in pieces:
        batch += piece
        if len(batch) >= PIECE_BYTES:
            yield batch
            batch = ""
    if batch:
        yield batch


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


def _check_nodes(route: str, text: Any, *marks: Any) -> None:
    """Raise TooLarge if a JSON text may have too many values; `marks` precede a value each."""
    if sum(map(text.count, marks)) > FREE_NODES + len(text) // BYTES_PER_NODE:
        raise TooLarge(f"{route} answered with too many JSON values")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999
        raise ValueError(f"{text} is out of range")
    return value
