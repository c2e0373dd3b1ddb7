"""Registers the hotkey with the validator API, once for each league and process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from neurons.miner.context import Context
from neurons.wire.outcomes import NotRegistered, ServerFault
from neurons.wire.rules import league_of

REGISTRATIONS = 2

Reply = TypeVar("Reply")


def register(context: Context, target_sequence_length: int) -> None:
    """Register in the league of the target, unless this process has already done so.

    The public server answers a second league of one hotkey with a 500, which is only logged.
    """
    league, _ = league_of(target_sequence_length)
    if league in context.registered:
        return
    try:
        reply = context.client.register(context.settings.reference_model, league)
        context.log.info("registered with the API", league=league, status=reply.status)
    except ServerFault as fault:
        context.log.warning("registration failed; going on", league=league, reason=fault.reason)
    context.registered.add(league)


def when_registered(context: Context, target: int, call: Callable[[], Reply]) -> Reply:
    """Return `call()`; when the server does not know the hotkey, register and call again.

    It registers more than once, because a server may lose its database just after a registration.
    """
    for _ in range(REGISTRATIONS):
        try:
            return call()
        except NotRegistered:
            context.registered.discard(league_of(target)[0])
            register(context, target)
    return call()
