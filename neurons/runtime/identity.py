"""Hotkeys, signatures and calls to the chain. Only this module imports bittensor.

The import takes about a second, so it happens at first use; `status` does without it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.measuring.process import die_with_parent
from neurons.runtime.errors import ConfigError, Problem, QuasarError
from neurons.runtime.loading import environment
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT

CHAIN_SECONDS = 20.0
WEIGHTS_SECONDS = 180.0
"""Includes the wait until the block with the weights is final."""
OFFLINE = "offline"
BTCLI = ".venv/bin/btcli"
"""The installation's own program, relative to the checkout."""
IF_SERVED = "register it only if the subnet runs this competition (docs/operating.md)"
"""Accompanies the command that registers a hotkey, which costs TAO."""


class ChainUnreachable(QuasarError):
    """A call to the chain failed or timed out, or the network is `offline`; one line of text."""


@dataclass(frozen=True)
class Identity:
    """A hotkey, by its public ss58 address, that can sign."""

    hotkey: str
    _keypair: Any = field(repr=False, compare=False)

    def sign(self, text: str) -> str:
        """Return the sr25519 signature of the UTF-8 text in hex, without 0x."""
        return bytes(self._keypair.sign(text.encode())).hex()


def hotkey_file(name: str, hotkey: str, path: Path) -> Path:
    """Return the path of the hotkey's private file."""
    return Path(os.path.expanduser(path)) / name / "hotkeys" / hotkey


def public_hotkey(name: str, hotkey: str, path: Path) -> str | None:
    """Return the ss58 address in the hotkey's file, without bittensor; None if unreadable."""
    try:
        address = json.loads(hotkey_file(name, hotkey, path).read_text())["ss58Address"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if isinstance(address, str) else None


def registration_command(settings: Settings) -> str:
    """Return the command that registers the miner's hotkey.

    Without the names, `btcli` would offer the wallet `default` and the main network. WALLET_PATH is
    omitted, because the coldkey, which signs the registration, is on another machine.
    """
    return (
        f"{BTCLI} subnets register --netuid {settings.netuid} "
        f"--network {settings.subtensor_network} --wallet {settings.wallet_miner_name} "
        f"--wallet-hotkey {settings.wallet_hotkey}"
    )


def wallet_warnings(name: str, hotkey: str, path: Path) -> list[Problem]:
    """Return the security problems of the wallet's files."""
    warnings = []
    coldkey = Path(os.path.expanduser(path)) / name / "coldkey"
    if coldkey.exists():
        problem = f"the coldkey's private file lies on this machine ({coldkey})"
        reason = f"{problem}; the miner does not need it"
        warnings.append(Problem(reason, "keep it elsewhere and remove it here"))
    private = hotkey_file(name, hotkey, path)
    if private.exists() and private.stat().st_mode & 0o077:
        warnings.append(
            Problem("others can read the hotkey file", f"chmod 600 {shlex.quote(str(private))}")
        )
    return warnings


def load_identity(
    name: str, hotkey: str, path: Path, named_by: str = "WALLET_MINER_NAME"
) -> Identity:
    """Load the hotkey `hotkey` of the wallet `name` under `path`.

    The setting `named_by` has the wallet's name. Raises a ConfigError if the file is missing,
    encrypted or unreadable, or if its key cannot sign as the API expects.
    """
    private = hotkey_file(name, hotkey, path)
    folder, quoted = shlex.quote(os.path.expanduser(path)), shlex.quote(str(private))
    flags = f"--wallet {name} --wallet-hotkey {hotkey} --wallet-path {folder}"
    new, again = (
        f"`{BTCLI} wallet {command} {flags}`"
        for command in ("new-hotkey", "regen-hotkey --overwrite")
    )

    def fault(problem: str, remedy: str) -> ConfigError:
        setting = f"{named_by}={name}, WALLET_HOTKEY={hotkey}, WALLET_PATH={path}"
        return ConfigError(Problem(f"The hotkey at {private} {problem} ({setting}).", remedy))

    try:
        exists = private.is_file()
    except PermissionError:
        remedy = "Start the program as the wallet's owner, or give this user a copy of the file."
        raise fault("is in a folder that this user cannot read", remedy) from None
    if not exists:
        remedy = f"Create it with {new} or copy the hotkey file from where it was made."
        raise fault("is missing", remedy)
    import bittensor as bt

    wallet = bt.Wallet(name=name, hotkey=hotkey, path=os.path.expanduser(path))
    try:
        if wallet.hotkey_file.is_encrypted():
            problem = "is encrypted, and a daemon cannot type its password"
            raise fault(problem, f"Write it again without one: {again}.")
        keypair = wallet.hotkey
    except ConfigError:
        raise
    except Exception as error:  # the binding raises bare ValueError, OSError and KeyFileError
        remedy = f"Check `chmod 600 {quoted}` and its owner, or write it again: {again}."
        # the cause may quote the file
        raise fault(f"cannot be read: {type(error).__name__}", remedy) from None
    identity = Identity(keypair.ss58_address, keypair)
    try:
        signs = verify(identity.hotkey, "check", identity.sign("check"))
    except ValueError:  # there is no private key
        signs = False
    if not signs:
        remedy = (
            "Its file has only the public part, or a key of another kind, such as ed25519. Copy "
            f"the private file from where it was made, or make one with {new}."
        )
        raise fault("gives no valid sr25519 signature", remedy)
    return identity


def create_throwaway(path: Path, name: str = "throwaway", hotkey: str = "default") -> Identity:
    """Return the hotkey under `path`, created without a password if it is missing."""
    if not hotkey_file(name, hotkey, path).exists():
        import bittensor as bt

        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        wallet = bt.Wallet(name=name, hotkey=hotkey, path=str(path))
        # suppress: without it the mnemonic is printed
        wallet.create_new_hotkey(use_password=False, overwrite=True, suppress=True)
    return load_identity(name, hotkey, path)


def prepare_to_verify() -> None:
    """Import the library of `verify` in advance, because that takes about a second."""
    import bittensor.sp_core  # noqa: F401


def verify(hotkey: str, text: str, signature_hex: str) -> bool:
    """Return whether `signature_hex` (with or without 0x) is `hotkey`'s signature of `text`."""
    from bittensor.sp_core import Keypair

    try:
        signature = bytes.fromhex(signature_hex.removeprefix("0x"))
        return bool(Keypair(ss58_address=hotkey).verify(text.encode(), signature))
    except ValueError:  # not an address, not hex, not 64 bytes
        return False


def registered_uid(
    hotkey: str, netuid: int, network: str, seconds: float = CHAIN_SECONDS
) -> int | None:
    """Read the hotkey's uid on the subnet; None if the hotkey is not registered there.

    Raises ChainUnreachable if no reply comes within `seconds`, or if the network is `offline`.
    """
    uid: int | None = _query_chain(network, seconds, find_uid, netuid, hotkey)
    return uid


@dataclass(frozen=True)
class Neuron:
    """A hotkey's place on the subnet: its uid, and its stake in whole tokens."""

    uid: int
    stake: float


def subnet_neurons(netuid: int, network: str) -> dict[str, Neuron]:
    """Read all registered hotkeys of the subnet, or raise ChainUnreachable."""
    rows = _query_chain(network, CHAIN_SECONDS, list_neurons, netuid)
    return {hotkey: Neuron(*row) for hotkey, row in rows.items()}


def set_weights(
    shares: Mapping[str, float], netuid: int, network: str, wallet: tuple[str, str, Path]
) -> dict[str, int]:
    """Set the weights of the wallet's hotkey on the chain, in proportion to these shares.

    Returns the uids of the registered hotkeys that got weights. Raises ChainUnreachable if the
    chain did not accept them within WEIGHTS_SECONDS.
    """
    words = [str(word) for word in wallet]
    uids = _query_chain(network, WEIGHTS_SECONDS, submit_weights, netuid, *words, dict(shares))
    return dict(uids)


def _query_chain(network: str, seconds: float, task: Callable[..., Any], *words: object) -> Any:
    """Return the result of `task` with the chain's client and `words`, from a child process.

    The client may retry forever, and its tasks may write tracebacks when they are destroyed. A
    child process can be ended in time, and its output is not shown.
    """
    if network == OFFLINE:
        raise ChainUnreachable("SUBTENSOR_NETWORK=offline: no chain is contacted.")
    call = json.dumps([network, task.__name__, *words])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "neurons.runtime.identity", call],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**environment(), "PYTHONPATH": str(PROJECT)},
            check=False,
        )
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
        reason = lines[-1] if lines else f"the chain's client ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no answer in {seconds:g} s"
    except OSError as error:
        reason = f"{sys.executable} cannot be started: {error.strerror}"
    raise ChainUnreachable(f"The network {network!r} cannot be reached ({reason}).")


def find_uid(client: Any, netuid: int, hotkey: str) -> int | None:
    """Return the hotkey's uid, or None."""
    uid = client.neurons.uid(hotkey_ss58=hotkey, netuid=netuid)
    return None if uid is None else int(uid)


def list_neurons(client: Any, netuid: int) -> dict[str, tuple[int, float]]:
    """Return each hotkey's uid and its stake in whole tokens."""
    rows = client.neurons.all(netuid=netuid)
    return {str(one.hotkey): (int(one.uid), int(one.total_stake.rao) / 1e9) for one in rows}


def submit_weights(
    client: Any, netuid: int, name: str, hotkey: str, path: str, shares: Mapping[str, float]
) -> dict[str, int]:
    """Set the weights; return the uids of registered hotkeys.

    The client adapts the weights to the subnet, and sends them in plain text or timelocked.
    """
    import bittensor as bt

    found = {key: find_uid(client, netuid, key) for key in shares}
    uids = {key: uid for key, uid in found.items() if uid is not None}
    if uids:
        weights = {uid: shares[key] for key, uid in uids.items()}
        wallet = bt.Wallet(name=name, hotkey=hotkey, path=path)
        intent = bt.SetWeights(netuid=netuid, weights=weights)
        client.execute(intent, wallet, retries=2).raise_for_failure()
    return uids


def _run_task(call: str) -> int:
    """Run one task in the child process; print its result as JSON, or an error in one line."""
    die_with_parent()
    network, task, *words = json.loads(call)
    try:
        import bittensor as bt

        result = globals()[task](bt.Subtensor(network), *words)
    except Exception as error:  # every failure counts as an unreachable chain
        message = " ".join(str(error).split())
        sys.stdout.write(f"\n{type(error).__name__}{message and f': {message}'}\n")
        return 1
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_run_task(sys.argv[1]))
