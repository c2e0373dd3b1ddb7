"""Every setting of every process, and what each is for.

`.env.example` is generated from the prose here by `python -m neurons.runtime.env_example`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

from neurons.runtime.errors import Problem
from neurons.runtime.values import (
    PROJECT,
    YEAR,
    Count,
    CountOrNone,
    Folder,
    Host,
    Hosts,
    Hotkeys,
    Name,
    Network,
    Networks,
    Port,
    Remote,
    Repository,
    Seconds,
    Servers,
    Target,
    Token,
    Url,
)
from neurons.wire.rules import SHORTEST_TARGET


def _splits(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"it is no command line ({error}); close what is quoted") from error
    if not words:
        raise ValueError("it names no command")
    return text


def _setting(default: Any, group: str, form: str, text: str) -> Any:
    """A field: which process it belongs to, the form of its value, and what it is for."""
    return Field(default, description=text, json_schema_extra={"group": group, "form": form})


FORK, API_USE, WALLET = "Publishing the fork", "Talking to the subnet", "Wallet"
MEASURE, LOGS = "Measuring and claiming", "State and logs"
VALIDATOR, SERVER = "Validator", "Validator API server"
INFERENCE = "Inference server"


class Settings(BaseModel):
    """The settings of this run, checked. Secrets are SecretStr and print as stars."""

    model_config = ConfigDict(frozen=True)

    _warnings: tuple[Problem, ...] = PrivateAttr(())

    github_token: Token | None = _setting(
        None,
        FORK,
        "a GitHub token, `ghp_...` or `github_pat_...`",
        "The token that creates the fork and pushes to it. Make one at GitHub under Settings, "
        "Developer settings, Personal access tokens: a classic token with the scope "
        "`public_repo`, or a fine-grained one with Contents and Administration read and write. "
        "Needed, with GITHUB_USERNAME, unless REPO_PATH or FORK_REMOTE is set.",
    )
    github_username: Name | None = _setting(
        None, FORK, "a GitHub account name", "The account that owns the fork and the token."
    )
    github_fork_name: Name = _setting(
        "flash-linear-attention", FORK, "a repository name", "What the fork is called."
    )
    github_upstream: Repository = _setting(
        "troy12x/flash-linear-attention",
        FORK,
        "`owner/name`",
        "The repository that is forked; validators time forks of this one.",
    )
    github_api_url: Url = _setting(
        "https://api.github.com", FORK, "an https address", "The address of GitHub's REST API."
    )
    fork_branch: Name = _setting(
        "quasar", FORK, "a branch name", "The branch of the fork that carries the kernels."
    )
    fork_scope: Literal["layer", "ops"] = _setting(
        "layer",
        FORK,
        "layer or ops",
        "What is published: the operator's folder, fla/ops/quasar, and the layer that validators "
        "time; or, with ops, that folder alone, for validators that accept no other change. What "
        "is published is what is measured.",
    )
    fork_remote: Remote | None = _setting(
        None,
        FORK,
        "a file:// address or a path",
        "A bare git repository used in place of GitHub. For trying things out: validators "
        "elsewhere cannot clone it.",
    )
    fork_upstream_url: Remote | None = _setting(
        None,
        FORK,
        "an address that `git clone` takes",
        "Where to fetch the upstream from when it is not GITHUB_UPSTREAM at GitHub.",
    )
    repo_path: Folder | None = _setting(
        None,
        FORK,
        "the folder of a git checkout",
        "An existing checkout of the fork to use, with the branch that it is on. Its `origin` is "
        "pushed to with GITHUB_TOKEN, or with your ssh key where `origin` is an ssh address and no "
        "token is set. git's credential helpers are not asked.",
    )
    publish_at: Literal["before_commit", "before_reveal"] = _setting(
        "before_commit",
        FORK,
        "before_commit or before_reveal",
        "When the kernels become public: before the commitment, or only just before the reveal, "
        "which keeps them private for about 20 minutes longer.",
    )
    validator_api_url: Url | None = _setting(
        None,
        API_USE,
        "an https address; http on this machine",
        "The subnet's validator API. Ask the subnet's owner or its documentation. Needed.",
    )
    submission_mode: Literal["auto", "commit_reveal", "direct"] = _setting(
        "auto",
        API_USE,
        "auto, commit_reveal or direct",
        "commit_reveal hides the fork until a later block, so that nobody can copy it in time; "
        "direct submits in one call. auto commits and reveals until this API shows a sign of "
        "judging a commitment before its reveal, when there is nothing to measure. It then "
        "submits directly for 48 hours, beginning with a claim that was judged so.",
    )
    netuid: Annotated[int, Field(ge=0, le=65535)] = _setting(
        24,
        API_USE,
        "a whole number from 0 to 65535",
        "The subnet's number on the chain (flag: --netuid).",
    )
    subtensor_network: Network = _setting(
        "finney",
        API_USE,
        "finney, test, local, archive, devnet, a ws:// or wss:// address, or offline",
        "The chain on which the hotkey's registration is looked up (flag: --subtensor.network). "
        "`offline` asks none.",
    )
    reference_model: str = _setting(
        "Qwen/Qwen2.5-0.5B-Instruct",
        API_USE,
        "the name of a model",
        "The model name with which the miner registers, and which logit verification compares.",
    )
    wallet_miner_name: Name = _setting(
        "quasar_miner", WALLET, "a wallet name", "The miner's wallet (flag: --wallet.name)."
    )
    wallet_hotkey: Name = _setting(
        "default",
        WALLET,
        "a hotkey name",
        "The hotkey of the wallet (flag: --wallet.hotkey). It signs; the coldkey is not needed "
        "on this machine and should not be here.",
    )
    wallet_path: Folder = _setting(
        Path("~/.bittensor/wallets").expanduser(),
        WALLET,
        "a folder",
        "Where wallets lie (flag: --wallet.path).",
    )
    target_sequence_length: Target | Literal["auto"] = _setting(
        100_000,
        MEASURE,
        f"a whole number of tokens from {SHORTEST_TARGET}, or auto",
        "The sequence length that is submitted; it decides the league and its multiplier. "
        "`auto` takes the length with the best claim times multiplier that this GPU's memory "
        "holds (flag: --target-seq-len).",
    )
    device: Literal["auto", "cuda", "cpu"] = _setting(
        "auto", MEASURE, "auto, cuda or cpu", "Where kernels run; auto takes a GPU if there is one."
    )
    claim_headroom: Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)] = _setting(
        0.0,
        MEASURE,
        "a share from 0 to 0.9",
        "How far the claim stays under what the measurements allow, which is at most the slowest "
        "accepted run and less where the runs differ (docs/honesty.md). A validator that measures "
        "less than 90 % of a claim scores it 0, so one whose GPU is that much slower needs some.",
    )
    claim_runs: Annotated[int, Field(ge=1, le=20)] = _setting(
        5,
        MEASURE,
        "a whole number from 1 to 20",
        "Fresh processes that time the target, at least. Five are taken in any case, and on a GPU "
        "up to sixteen until the noise is known.",
    )
    bench_timeout_seconds: Seconds = _setting(
        300.0,
        MEASURE,
        "seconds, above 0 and at most a year",
        "After this long a measurement's processes are killed.",
    )
    pytorch_cuda_alloc_conf: str | None = _setting(
        None,
        MEASURE,
        "PyTorch's own syntax, such as expandable_segments:True",
        "Passed to the measuring processes. A validator sets none, so neither does the default.",
    )
    optimization_interval: Annotated[float, Field(ge=0, le=YEAR, allow_inf_nan=False)] = _setting(
        300.0,
        MEASURE,
        "seconds, from 0 to a year",
        "The pause between two cycles (flag: --optimization-interval).",
    )
    agent_iterations: CountOrNone = _setting(
        0,
        MEASURE,
        "a whole number from 0",
        "Candidates for the kernels' tiles that are tried after each cycle, while nothing else is "
        "to do; needs a GPU and `scripts/install.sh tuning`. What is faster beyond the noise is "
        "published with the next submission. 0 tries none (flag: --agent-iterations).",
    )
    tune_command: Annotated[str, AfterValidator(_splits)] | None = _setting(
        None,
        MEASURE,
        "a command line, which no shell reads",
        "Your own optimiser: run after each cycle in a copy of the kernels, which it may change. "
        "The change is published when it keeps the subnet's rules, passes the correctness gate "
        "and is faster beyond the noise; the log says why it is not. Files of this folder may be "
        "named as from here.",
    )
    tune_seconds: Seconds = _setting(
        600.0,
        MEASURE,
        "seconds, above 0 and at most a year",
        "After this long a command that tunes is killed.",
    )
    state_dir: Folder = _setting(
        PROJECT / "state",
        LOGS,
        "a folder",
        "Where the journal, the clone, the reports and the log lie. Keep it: it holds the salt "
        "of a commitment that waits for its reveal.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _setting(
        "INFO",
        LOGS,
        "DEBUG, INFO, WARNING or ERROR",
        "The least important line that is logged (flag: --logging.debug).",
    )
    log_format: Literal["console", "json"] = _setting(
        "console", LOGS, "console or json", "One line an event for people, or one JSON object."
    )
    metrics_port: Port | None = _setting(
        None,
        LOGS,
        "a port from 0 to 65535",
        "The miner then answers /metrics (Prometheus) and /healthz on this port of 127.0.0.1. "
        "`scripts/install.sh metrics` installs what that needs.",
    )
    wallet_validator_name: Name = _setting(
        "quasar_validator", VALIDATOR, "a wallet name", "The validator's wallet."
    )
    polling_interval: Seconds = _setting(
        300.0,
        VALIDATOR,
        "seconds, above 0 and at most a year",
        "The pause between two looks at the queue.",
    )
    sandbox: Literal["required", "preferred", "off"] = _setting(
        "required",
        VALIDATOR,
        "required, preferred or off",
        "Forks run shut in by bubblewrap: no network, no files of this user, limits on memory, "
        "processes and disk. Where this machine cannot do that the validator does not start, or, "
        "with `preferred`, runs strangers' code with this user's rights, as `off` always does: "
        "only for forks that you trust.",
    )
    fork_hosts: Hosts = _setting(
        ("github.com",),
        VALIDATOR,
        "names of hosts with commas between, such as github.com",
        "Where forks are cloned from, by https and from public addresses only.",
    )
    allow_file_forks: bool = _setting(
        False,
        VALIDATOR,
        "true or false",
        "Whether forks on this machine (file://, and http on loopback) are taken by the API and "
        "cloned by the validator as well: for a subnet at home.",
    )
    set_weights: bool = _setting(
        True,
        VALIDATOR,
        "true or false",
        "Whether the shares of the last round are set as weights on the chain of "
        "SUBTENSOR_NETWORK; otherwise they are shown in the log.",
    )
    weights_interval: Seconds = _setting(
        3600.0,
        VALIDATOR,
        "seconds, above 0 and at most a year",
        "After this long the same weights are set again.",
    )
    enable_logit_verification: bool = _setting(
        False,
        VALIDATOR,
        "true or false",
        "Whether a miner's inference server is compared with the one at REFERENCE_INFERENCE_URL: "
        "the same prompt, the logits of the same step.",
    )
    inference_servers: Servers = _setting(
        (),
        VALIDATOR,
        "hotkey=address pairs with commas between",
        "Where miners answer POST /inference. A hotkey that is not named is not asked.",
    )
    reference_inference_url: Url = _setting(
        "http://127.0.0.1:8001",
        VALIDATOR,
        "an http address on this machine, or an https one",
        "The validator's own inference server, with the reference model.",
    )
    cosine_sim_threshold: Annotated[float, Field(ge=-1, le=1)] = _setting(
        0.99, VALIDATOR, "a cosine from -1 to 1", "The least cosine between two servers' logits."
    )
    max_abs_diff_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _setting(
        0.1, VALIDATOR, "a number from 0", "The most by which one logit of two servers may differ."
    )
    blocks_until_reveal: CountOrNone = _setting(
        100, SERVER, "a whole number from 0", "Blocks between a commitment and its reveal."
    )
    reveal_window_blocks: Count = _setting(
        300,
        SERVER,
        "a whole number from 1",
        "Blocks from then on in which the reveal is taken; a commitment that is older has expired.",
    )
    block_time_seconds: Count = _setting(
        12, SERVER, "whole seconds, from 1", "How long a block lasts on the server's clock."
    )
    database_url: SecretStr | None = _setting(
        None,
        SERVER,
        "an SQLAlchemy address: sqlite:///file.db or postgresql://user:password@host/name",
        "Where submissions are stored; without it, an SQLite file in STATE_DIR.",
    )
    host: Host = _setting(
        "127.0.0.1",
        SERVER,
        "an address of this machine",
        "What the server listens on. Put a reverse proxy with TLS before anything but loopback.",
    )
    port: Port = _setting(
        8000, SERVER, "a port from 0 to 65535", "The server's port; 0 takes a free one."
    )
    validator_hotkeys: Hotkeys = _setting(
        (),
        SERVER,
        "ss58 addresses with commas between",
        "The hotkeys that may write verdicts: the registered validators.",
    )
    uids_from_chain: bool = _setting(
        False,
        SERVER,
        "true or false",
        "Whether the uids of hotkeys are those of NETUID on the chain of SUBTENSOR_NETWORK, asked "
        "every ten minutes; otherwise the server counts its own.",
    )
    validator_stake: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = _setting(
        None,
        SERVER,
        "a number of tokens from 0",
        "Hotkeys that are registered there with at least this stake may write verdicts as well.",
    )
    rate_limit: CountOrNone = _setting(
        10,
        SERVER,
        "a whole number from 0",
        "How often a hotkey may register, submit, commit and reveal in a minute; 0 means no limit.",
    )
    trusted_proxies: Networks = _setting(
        (),
        SERVER,
        "IP addresses or networks with commas between, or * for any",
        "The reverse proxies whose X-Forwarded-For is believed; bans count the address it names. "
        "Behind any other proxy of this machine or network they count hotkeys.",
    )

    miner_inference_port: Port = _setting(
        8001,
        INFERENCE,
        "a port from 0 to 65535",
        "The inference server's port; 0 takes a free one.",
    )
    inference_host: Host = _setting(
        "127.0.0.1",
        INFERENCE,
        "an address of this machine",
        "What the inference server listens on. Put a reverse proxy before anything but loopback.",
    )
    inference_dtype: Literal["auto", "float32", "float16", "bfloat16"] = _setting(
        "auto",
        INFERENCE,
        "auto, float32, float16 or bfloat16",
        "What the model computes in; auto takes bfloat16 on a GPU and float32 on a CPU.",
    )
    max_prompt_tokens: Count = _setting(
        2048, INFERENCE, "a whole number from 1", "The longest prompt that is answered."
    )
    max_new_tokens: Count = _setting(
        1024, INFERENCE, "a whole number from 1", "The most tokens that one request may ask for."
    )
    inference_compile: bool = _setting(
        True,
        INFERENCE,
        "true or false",
        "Whether decoding on a GPU is compiled by torch.compile while the server loads: faster "
        "tokens, for a minute or less at the start.",
    )
    inference_queue: Count = _setting(
        16,
        INFERENCE,
        "a whole number from 1",
        "Requests that may wait; more are told to come back.",
    )

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is worth a warning in the log about where the settings came from."""
        return self._warnings

    @property
    def miner_wallet(self) -> tuple[str, str, Path]:
        """The miner's wallet, its hotkey, and the folder where wallets lie."""
        return self.wallet_miner_name, self.wallet_hotkey, self.wallet_path

    @property
    def tune_words(self) -> list[str]:
        """The words of TUNE_COMMAND; those that name a file of this checkout are absolute."""
        words = shlex.split(self.tune_command or "")
        return [str(PROJECT / word) if (PROJECT / word).is_file() else word for word in words]

    def secrets(self) -> list[str]:
        """Return the values that must never be printed; a file of SQLite has no password."""
        values = [self.github_token, self.database_url]
        texts = [value.get_secret_value() for value in values if value is not None]
        return [text for text in texts if not text.startswith("sqlite:")]
