"""Identity: real wallet files, real signatures, and the chain's client in a child process."""

import json
import socket
import sys
from pathlib import Path

import pytest
from bittensor import Wallet
from bittensor.sp_core import Keypair

from neurons.runtime import identity
from neurons.runtime.errors import ConfigError
from tests.processes import run
from tests.servers import free_port


def test_a_throwaway_is_created_once_without_output(tmp_path, capfd):
    first = identity.create_throwaway(tmp_path / "wallets")
    second = identity.create_throwaway(tmp_path / "wallets")
    assert first.hotkey == second.hotkey
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # above all no mnemonic
    private = identity.hotkey_file("throwaway", "default", tmp_path / "wallets")
    assert private.stat().st_mode & 0o077 == 0
    assert "Keypair" not in repr(first)


def test_a_signature_is_valid_only_for_its_signer_and_text(tmp_path: Path) -> None:
    me = identity.create_throwaway(tmp_path)
    signature = me.sign("text with ü")
    assert len(bytes.fromhex(signature)) == 64
    # the independent check: bittensor's own verification of the UTF-8 bytes
    assert Keypair(ss58_address=me.hotkey).verify("text with ü".encode(), bytes.fromhex(signature))
    assert identity.verify(me.hotkey, "text with ü", signature)
    assert identity.verify(me.hotkey, "text with ü", "0x" + signature)
    assert not identity.verify(me.hotkey, "another text", signature)
    alice = Keypair.create_from_uri("//Alice").ss58_address
    assert not identity.verify(alice, "text with ü", signature)


@pytest.mark.parametrize("signature", ["", "zz", "ab" * 63, "ab" * 64, "0x"])
def test_a_malformed_signature_is_invalid(signature: str) -> None:
    alice = Keypair.create_from_uri("//Alice").ss58_address
    assert not identity.verify(alice, "text", signature)
    assert not identity.verify("not an address", "text", signature)


def test_row_32_a_missing_hotkey_is_reported_with_the_command(tmp_path):
    with pytest.raises(ConfigError) as caught:
        identity.load_identity("w", "hot", tmp_path)
    assert "WALLET_MINER_NAME=w" in str(caught.value)
    command = str(caught.value).split("`")[1].split()
    btcli = Path(sys.executable).with_name(Path(command[0]).name)
    done = run(btcli, *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert identity.load_identity("w", "hot", tmp_path).hotkey.startswith("5")


def test_row_32_an_encrypted_hotkey_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    wallet = Wallet(name="w", hotkey="hot", path=str(tmp_path))
    wallet.create_new_hotkey(
        use_password=True, overwrite=True, suppress=True, hotkey_password="canary-password"
    )
    with pytest.raises(ConfigError, match="is encrypted") as caught:
        identity.load_identity("w", "hot", tmp_path)
    assert "btcli wallet regen-hotkey" in str(caught.value)


def test_row_32_a_damaged_hotkey_is_rejected_without_quoting_it(tmp_path: Path) -> None:
    private = identity.hotkey_file("w", "hot", tmp_path)
    private.parent.mkdir(parents=True)
    private.write_text('{"secretSeed": "canary"}')
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        identity.load_identity("w", "hot", tmp_path)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("kind", ["public", "ed25519"])
def test_a_hotkey_that_cannot_sign_is_rejected(tmp_path: Path, kind: str) -> None:
    wallet = Wallet(name="w", hotkey="hot", path=str(tmp_path))
    wallet.create_new_hotkey(
        use_password=False, overwrite=True, suppress=True, crypto_type=int(kind == "public")
    )
    private = identity.hotkey_file("w", "hot", tmp_path)
    if kind == "public":
        content = json.loads(private.read_text())
        public = ("accountId", "publicKey", "ss58Address")
        private.write_text(json.dumps({name: content[name] for name in public}))
    with pytest.raises(ConfigError, match="no valid sr25519 signature") as caught:
        identity.load_identity("w", "hot", tmp_path)
    assert "btcli wallet new-hotkey --wallet w" in str(caught.value)


def test_offline_contacts_no_chain() -> None:
    with pytest.raises(identity.ChainUnreachable, match="offline"):
        identity.registered_uid("5abc", 24, identity.OFFLINE)


def test_errors_of_the_chains_client_are_one_line(capfd):
    for network in (f"ws://127.0.0.1:{free_port()}", "no-such-network"):
        with pytest.raises(identity.ChainUnreachable, match="cannot be reached") as caught:
            identity.registered_uid("5abc", 24, network)
        assert network in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_silent_chain_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        network = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(identity.ChainUnreachable, match=r"no answer in 0\.2 s"):
            identity.registered_uid("5abc", 24, network, seconds=0.2)


@pytest.mark.parametrize("uid", [7, 0, None])
def test_the_clients_own_output_does_not_change_its_answers(uid, tmp_path, monkeypatch):
    (tmp_path / "bittensor.py").write_text(
        "from types import SimpleNamespace as Row\n"
        "print('connecting ...', end='')\n"
        "class Subtensor:\n"
        "    def __init__(self, network): self.neurons = self\n"
        f"    def uid(self, hotkey_ss58, netuid): return {uid} if netuid == 24 else 99\n"
        "    def all(self, netuid):\n"
        "        stake = Row(rao=1_500_000_000)\n"
        "        return [Row(hotkey='5abc', uid=7, total_stake=stake)] if netuid == 24 else []\n"
    )
    monkeypatch.chdir(tmp_path)  # `python -m` looks there first
    assert identity.registered_uid("5abc", 24, "finney") == uid
    if uid:
        assert identity.subnet_neurons(24, "finney") == {"5abc": identity.Neuron(uid=7, stake=1.5)}
