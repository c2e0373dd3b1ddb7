"""Structured logs: one line per event, for `tail -f`, with secrets removed.

Each process's entry point calls `configure` once; all other code calls `get_logger`. Records of the
standard library's loggers (uvicorn, bittensor, warnings) are formatted in the same way.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog
from stamina.instrumentation import set_on_retry_hooks
from stamina.typing import RetryDetails
from structlog.typing import EventDict, Processor, WrappedLogger

from harness.terminal import printable

REDACTED = "[redacted]"
LOG_FILE_BYTES = 10 * 2**20
LOG_FILES_KEPT = 5
QUIET = ("bittensor", "httpx", "httpcore", "git", "asyncio", "async_substrate_interface")
"""Libraries that are logged from WARNING on."""

_SECRET_KEY = re.compile(
    r"(?:^|[_\-.])(?:token|salt|signature|password|authorization|secret|mnemonic)$", re.IGNORECASE
)
# Well-known formats, so that unregistered secrets are removed too.
_SECRET_SHAPE = re.compile(
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_MINIMUM_SECRET = 4  # shorter values would remove ordinary words

_secrets: set[str] = set()


def register_secret(value: str) -> None:
    """Remove `value` from every line that is logged from now on, unless it is short."""
    if len(value) >= _MINIMUM_SECRET:
        _secrets.add(value)


def forget_secret(value: str) -> None:
    """Stop removing `value`, which is now public: many secrets would slow down every line."""
    _secrets.discard(value)


def redact(text: str) -> str:
    """Return `text` without the registered secrets and without well-known secret shapes."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _SECRET_SHAPE.sub(REDACTED, text)


def redact_text(text: str) -> str:
    """Return untrusted text on one line of at most 300 characters, without secrets and controls."""
    text = re.sub(r"(?<=://)[^/\s@]+@", "", redact(text))
    return printable(re.sub(r"[\x00-\x1f\x7f-\x9f\s]+", " ", text)).strip()[:300]


def redact_value(value: Any, key: str = "") -> Any:
    """Return `value` without secrets; the whole value of a key such as `token` is a secret."""
    if key and value is not None and _SECRET_KEY.search(key):
        return REDACTED
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_value(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [redact_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return redact(str(value))


def _redact_event(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {key: redact_value(value, key) for key, value in event.items() if key[0] != "_"}


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if isinstance(value, str) and (not text or re.search(r'[\s="]', text)):
        text = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def render_console(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Render `2026-01-31 12:00:00Z info     sentence  key=value`; a traceback follows, indented.

    Control characters are escaped: text of a remote server cannot forge a line of the log.
    """
    rest = dict(event)
    moment, level = str(rest.pop("timestamp", "")), str(rest.pop("level", ""))
    sentence = "".join(c if c.isprintable() else " " for c in str(rest.pop("event", "")))
    trace = rest.pop("exception", None)
    rest.pop("logger", None)
    words = " ".join(f"{key}={_word(value)}" for key, value in rest.items())
    line = f"{moment} {level:<8} {sentence}" + (f"  {words}" if words else "")
    if trace:
        line += "".join(f"\n    {printable(row)}" for row in str(trace).splitlines())
    return line


def _report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    get_logger("uncaught").critical("uncaught exception", exc_info=(kind, error, trace))


def configure(
    level: str = "INFO",
    fmt: str = "console",
    secrets: Iterable[str] = (),
    file: Path | None = None,
    ordinary: TextIO | None = None,
) -> None:
    """Send this process's log to stderr, and to a rotated `file` if it is not None.

    Args:
        fmt: `console` for people, `json` for machines (one object a line).
        secrets: values that must never appear in a line.
        file: a log file of mode 0600, rotated at 10 MiB; 5 files are kept. Its folder is created.
        ordinary: receives lines below WARNING, because process managers treat stderr as errors.
    """
    for secret in secrets:
        register_secret(secret)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if ordinary is not None:
        handlers[0].setLevel(logging.WARNING)
        handlers.append(logging.StreamHandler(ordinary))
        handlers[1].addFilter(lambda record: record.levelno < logging.WARNING)
    if file is not None:
        handlers.append(_file_handler(file))
    for handler in handlers:
        handler.setFormatter(_formatter(fmt))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(fmt),
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a test may configure again
    )
    set_on_retry_hooks([_report_retry])
    sys.excepthook = _report_uncaught
    threading.excepthook = lambda args: _report_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def append(file: Path, text: str) -> None:
    """Append the reason for the program's end to its log file; do nothing if the disk fails."""
    with suppress(OSError), closing(_file_handler(file)) as handler:
        handler.setFormatter(_formatter("console"))
        for line in text.splitlines():
            handler.handle(logging.LogRecord("miner", logging.CRITICAL, "", 0, "%s", (line,), None))


def _shared(fmt: str) -> list[Processor]:
    """Return the processors that complete the lines of every logger."""
    form = "iso" if fmt == "json" else "%Y-%m-%d %H:%M:%SZ"
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt=form, utc=True),
    ]


def _formatter(fmt: str) -> logging.Formatter:
    renderer: Processor = render_console
    if fmt == "json":
        renderer = structlog.processors.JSONRenderer()  # escapes non-ASCII terminal codes
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared(fmt), structlog.stdlib.PositionalArgumentsFormatter()],
        processors=[structlog.processors.format_exc_info, _redact_event, renderer],
    )


def _report_retry(details: RetryDetails) -> None:
    """Log a quick retry at debug level; stamina's own line would show the call's arguments."""
    get_logger("http").debug(
        "no answer, asking again",
        reason=str(details.caused_by),
        seconds=round(details.wait_for, 1),
        attempt=details.retry_num,
    )


class _FileHandler(logging.handlers.RotatingFileHandler):
    """A private log file that skips lines while the disk is full; stdout or stderr has them too."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).touch(mode=0o600)  # also the new file after each rotation
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _file_handler(file: Path) -> logging.Handler:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _FileHandler(
        file, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES_KEPT - 1, encoding="utf-8"
    )


def get_logger(name: str, **context: object) -> structlog.stdlib.BoundLogger:
    """Return a logger that adds `context` to each line."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name, **context)
    return logger
