"""SIGTERM and Ctrl-C end a training after its step; a second signal ends it immediately."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICE = b"\nstopping after this step; send the signal again to stop without saving\n"


class Stop:
    """The signal that ends the training; None until one arrives."""

    signal: int | None = None

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Record the first SIGTERM or SIGINT instead of ending the process, until the block ends."""
    stop, before = Stop(), {one: signal.getsignal(one) for one in SIGNALS}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def note(number: int, _: FrameType | None) -> None:
        stop.signal = number
        os.write(2, NOTICE)  # a signal may arrive while a stream is being written
        restore()

    for one in SIGNALS:
        signal.signal(one, note)
    try:
        yield stop
    finally:
        restore()
