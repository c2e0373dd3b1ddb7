"""Every setting of every process, with its description.

`python -m neurons.runtime.env_example` generates `.env.example` from these docstrings.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

from neurons.runtime.errors import Problem
from neurons.runtime.values import (
    PROJECT,
    YEAR,
    CommandLine,
    Count,
    CountOrNone,
    Folder,
    Form,
    Host,
    Hosts,
    Hotkey,
    Hotkeys,
    Name,
    Network,
    Networks,
    Port,
    Remote,
    Repository,
    Seconds,
    SecretUrl,
    Servers,
    Target,
    Token,
    Url,
)
from neurons.wire.rules import Ranking

GROUPS = {
    "github_token": "Publishing the fork",
    "validator_api_url": "The subnet",
    "wallet_miner_name": "Wallet",
    "target_sequence_length": "Measuring and claiming",
    "state_dir": "State and logs",
    "alert_command": "Alerts",
    "wallet_validator_name": "Validator",
    "blocks_until_reveal": "Validator API server",
    "miner_inference_port": "Inference server",
}
"""The headings of .env.example, by the setting that follows each."""


class Settings(BaseModel):
    """The settings of this run, checked. Secrets are SecretStr and print as stars."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    _warnings: tuple[Problem, ...] = PrivateAttr(())

    github_token: Token | None = None
    """The token that creates the fork and pushes to it. Create it at GitHub under Settings,
    Developer settings, Personal access tokens: a classic token with the scope `public_repo`, or a
    fine-grained token with Contents and Administration read and write. Required, with
    GITHUB_USERNAME, unless REPO_PATH or FORK_REMOTE is set.
    """
    github_username: Annotated[Name, Form("a GitHub account name")] | None = None
    """The account that owns the fork and the token."""
    github_fork_name: Annotated[Name, Form("a repository name")] = "flash-linear-attention"
    """The name of the fork."""
    github_upstream: Repository = "troy12x/flash-linear-attention"
    """The repository to fork. Validators time forks of this one."""
    github_api_url: Annotated[Url, Form("an https address")] = "https://api.github.com"
    """The address of GitHub's REST API."""
    fork_branch: Annotated[Name, Form("a branch name")] = "quasar"
    """The branch of the fork that carries the kernels."""
    fork_scope: Literal["layer", "ops"] = "layer"
    """layer publishes the operator's folder fla/ops/quasar and the layer that validators time. ops
    publishes the folder alone, for validators that accept no other change. The miner measures what
    it publishes.
    """
    fork_remote: Annotated[Remote, Form("a file:// address or a path")] | None = None
    """A bare git repository to use instead of GitHub, for trials: validators on other machines
    cannot clone it, and the API and the validator need ALLOW_FILE_FORKS=true.
    """
    fork_upstream_url: Annotated[Remote, Form("an address that `git clone` takes")] | None = None
    """The address of the upstream repository if it is not GITHUB_UPSTREAM at GitHub."""
    repo_path: Annotated[Folder, Form("the folder of a git checkout")] | None = None
    """An existing checkout of the fork to use instead of a clone. The miner commits to its current
    branch and pushes to its `origin` with GITHUB_TOKEN, or with your ssh key if `origin` is an ssh
    address and no token is set. Git's credential helpers are not used.
    """
    publish_at: Literal["before_commit", "before_reveal"] = "before_commit"
    """When the kernels become public: before the commitment, or just before the reveal, which keeps
    them private for about 20 minutes longer.
    """
    validator_api_url: Annotated[Url, Form("an https address; http on this machine")] | None = None
    """The validator API of the competition; its organiser gives the address. Required. See
    docs/operating.md for what netuid 24 does today.
    """
    submission_mode: Literal["auto", "commit_reveal", "direct"] = "auto"
    """commit_reveal hides the fork's address, the commit and the claim until a later block. direct
    submits everything in one call. auto commits and reveals unless validators of this API seem to
    judge commitments before their reveal, without a measurement. The miner then submits directly
    for 48 hours, starting with the affected claim.
    """
    netuid: Annotated[int, Field(ge=0, le=65535), Form("a whole number from 0 to 65535")] = 24
    """The subnet's number on the chain (flag: --netuid)."""
    subtensor_network: Network = "finney"
    """The chain that holds the hotkey's registration (flag: --subtensor.network). offline contacts
    no chain.
    """
    reference_model: Annotated[str, Form("the name of a model")] = "Qwen/Qwen2.5-0.5B-Instruct"
    """The model with which the miner registers and which the inference servers load for logit
    verification.
    """
    wallet_miner_name: Annotated[Name, Form("a wallet name")] = "quasar_miner"
    """The miner's wallet (flag: --wallet.name)."""
    wallet_hotkey: Annotated[Name, Form("a hotkey name")] = "default"
    """The wallet's hotkey, which signs (flag: --wallet.hotkey). The coldkey is not needed and
    should not be on this machine.
    """
    wallet_path: Folder = Path(os.path.expanduser("~/.bittensor/wallets"))
    """The folder of the wallets (flag: --wallet.path)."""
    target_sequence_length: Target | Literal["auto"] = 100_000
    """The sequence length to submit. It determines the league and its multiplier. auto starts with
    the league of the highest multiplier and takes the first length that fits into this GPU's memory
    (flag: --target-seq-len).
    """
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device that runs the kernels; auto takes a GPU if there is one."""
    claim_headroom: Annotated[
        float, Field(ge=0, le=0.9, allow_inf_nan=False), Form("a share from 0 to 0.9")
    ] = 0.0
    """Share by which the claim stays below the limit that the measurements allow (docs/honesty.md).
    A validator scores a claim 0 if it measures less than 90% of it. Raise this if validators' GPUs
    may be more than 10% slower than yours.
    """
    claim_runs: Annotated[int, Field(ge=1, le=20), Form("a whole number from 1 to 20")] = 5
    """Minimum number of processes that time the target. For a claim, values below 5 count as 5, and
    on a GPU the miner takes up to 16 (or this number, if larger) until the noise is known.
    """
    bench_timeout_seconds: Seconds = 300.0
    """Time limit of a measuring process."""
    pytorch_cuda_alloc_conf: (
        Annotated[str, Form("PyTorch's own syntax, such as expandable_segments:True")] | None
    ) = None
    """The value of this variable in measuring processes. Empty by default, as on validators."""
    optimization_interval: Annotated[
        float, Field(ge=0, le=YEAR, allow_inf_nan=False), Form("seconds, from 0 to a year")
    ] = 300.0
    """Pause between two checks for a new round or changed kernels (flag: --optimization-interval).
    """
    agent_iterations: CountOrNone = 0
    """Number of changed kernel constants to try after each cycle while the miner is idle. Requires
    a GPU. A gain beyond the noise is published with the next submission. 0 disables the search
    (flag: --agent-iterations).
    """
    tune_command: CommandLine | None = None
    """Your own optimiser. It runs after each cycle in a copy of the kernels, which it may change.
    The change is published if it keeps the subnet's rules, passes the correctness check and is
    faster beyond the noise; otherwise the log gives the reason. Paths may be relative to the
    checkout.
    """
    tune_seconds: Seconds = 600.0
    """Time limit of a tuning command."""
    tune_gpus: Count = 1
    """Number of GPUs, of one model, that try constants at the same time. Claims are measured on
    the first one only.
    """
    state_dir: Folder = PROJECT / "state"
    """The folder of the journal, the clone, the reports and the log. Do not delete it: it holds the
    salt of a commitment until its reveal.
    """
    journal_copy: Folder | None = None
    """A folder on another disk or mount that gets a copy of the journal after each commitment:
    without the salt in the journal, a commitment cannot be revealed. `restore` finds the copy.
    """
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The lowest level to log (flag for DEBUG: --logging.debug)."""
    log_format: Literal["console", "json"] = "console"
    """One line per event for people, or one JSON object per event."""
    metrics_port: Port | None = None
    """Port of 127.0.0.1 for /metrics (Prometheus) and /healthz; empty for none. Requires
    `scripts/install.sh metrics`.
    """
    alert_command: CommandLine | None = None
    """A command that is run once for each alert (listed in docs/monitoring.md). It reads a sentence
    from stdin and finds ALERT_KIND and ALERT_TEXT in its environment, which has no secrets. It is
    killed after 30 seconds. Paths may be relative to the checkout.
    """
    alert_url: SecretUrl | None = None
    """Address to which each alert is posted as JSON with the fields kind, text and content, as the
    webhooks of common chats read them.
    """
    wallet_validator_name: Annotated[Name, Form("a wallet name")] = "quasar_validator"
    """The validator's wallet."""
    polling_interval: Seconds = 300.0
    """Pause between two polls of the queue."""
    sandbox: Literal["required", "preferred", "off"] = "required"
    """required: the validator runs forks in a bubblewrap sandbox (no network, no files of this
    user, limits on cores, memory, processes and disk) and does not start without it. preferred: if
    the sandbox does not work, forks run with this user's rights. off: they always do. Use preferred
    and off only for forks that you trust.
    """
    fork_hosts: Hosts = ("github.com",)
    """Hosts from which forks are cloned, over https and from public addresses only."""
    allow_file_forks: bool = False
    """Whether the API accepts and the validator clones forks on this machine (file://; the API also
    accepts http on loopback). Required for a subnet without GitHub; set it for both processes.
    """
    set_weights: bool = True
    """Whether the validator sets the last round's shares as weights on the chain of
    SUBTENSOR_NETWORK. Otherwise it only logs them.
    """
    weights_interval: Seconds = 3600.0
    """Interval after which unchanged weights are set again."""
    enable_logit_verification: bool = False
    """Whether the validator compares a miner's inference server with the one at
    REFERENCE_INFERENCE_URL by the logits of one step for the same prompt.
    """
    inference_servers: Servers = ()
    """Addresses of miners' inference servers. Hotkeys without an entry are not verified."""
    reference_inference_url: Annotated[
        Url, Form("an http address on this machine, or an https one")
    ] = "http://127.0.0.1:8001"
    """The validator's own inference server, with the reference model."""
    cosine_sim_threshold: Annotated[float, Field(ge=-1, le=1), Form("a cosine from -1 to 1")] = 0.99
    """Minimum cosine between the logits of two servers."""
    max_abs_diff_threshold: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Form("a number from 0")
    ] = 0.1
    """Maximum difference between two servers in any logit."""
    blocks_until_reveal: CountOrNone = 100
    """Blocks between a commitment and its reveal."""
    reveal_window_blocks: Count = 300
    """Number of blocks, from the reveal block on, in which the API accepts a reveal."""
    block_time_seconds: Annotated[Count, Form("whole seconds, from 1")] = 12
    """Length of a block on the server's clock."""
    ranking: Ranking | None = None
    """A round's rule. claim is the public rule: confirmed claims times the league's multiplier.
    verified ranks by the claim, or by the validator's speed if that is lower; results within 3%
    count as equal, and the earlier submission comes first, so that a copy of a revealed commit
    gains nothing by a higher claim. A change applies from the next round. By default a new
    competition uses verified, and an existing one keeps its rule.
    """
    database_url: (
        Annotated[
            SecretStr,
            Form(
                "an SQLAlchemy address: sqlite:///file.db or postgresql://user:password@host/name"
            ),
        ]
        | None
    ) = None
    """The database; by default an SQLite file in STATE_DIR."""
    host: Host = "127.0.0.1"
    """The address that the API listens on. Put a reverse proxy with TLS in front of any address but
    loopback.
    """
    port: Port = 8000
    """The API's port; 0 selects a free one."""
    validator_hotkeys: Hotkeys = ()
    """Hotkeys that may write verdicts: the registered validators. The inference server also reads
    this setting: signed requests from these hotkeys go first and have reserved places in the
    queue.
    """
    uids_from_chain: bool = False
    """Whether the API reads the uids of hotkeys on NETUID from the chain of SUBTENSOR_NETWORK every
    ten minutes. It also does so if VALIDATOR_STAKE or REQUIRE_REGISTRATION is set. Otherwise it
    assigns uids itself.
    """
    require_registration: bool = False
    """Whether the API accepts only miners that are registered on NETUID of SUBTENSOR_NETWORK, where
    new hotkeys cost something. While the chain is unreachable, its last reply counts.
    """
    validator_stake: (
        Annotated[float, Field(ge=0, allow_inf_nan=False), Form("a number of tokens from 0")] | None
    ) = None
    """Hotkeys on NETUID with at least this stake on the chain may also write verdicts."""
    rate_limit: CountOrNone = 10
    """Calls per hotkey and minute (register, submit, commit and reveal together); 0 means no limit.
    """
    trusted_proxies: Networks = ()
    """Reverse proxies. The API and the inference server trust the X-Forwarded-For header of these:
    bans then apply to the addresses in it. Behind any other proxy of this machine or network, bans
    apply to hotkeys, and all clients of the inference server count as one.
    """

    miner_inference_port: Port = 8001
    """The inference server's port; 0 selects a free one."""
    inference_host: Host = "127.0.0.1"
    """The address that the inference server listens on. Put a reverse proxy in front of any address
    but loopback.
    """
    inference_hotkey: Hotkey | None = None
    """The miner's hotkey, which validators name when they sign a request for this server; by
    default that of WALLET_MINER_NAME.
    """
    accept_unnamed_recipients: bool = False
    """Whether the server accepts signatures of version 0.2. These do not name the recipient, so
    another miner can forward such a request. The next version removes this setting.
    """
    inference_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """The model's dtype; auto takes bfloat16 on a GPU and float32 on a CPU."""
    max_prompt_tokens: Count = 2048
    """Maximum number of tokens in a prompt."""
    max_new_tokens: Count = 1024
    """Maximum number of tokens that a request may generate."""
    inference_compile: bool = True
    """Whether torch.compile compiles decoding on a GPU while the server loads. Tokens are then
    faster, and the start takes up to a minute longer.
    """
    inference_queue: Count = 16
    """Maximum number of waiting requests. The server answers further ones with 503 and Retry-After.
    """

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Warnings about the sources of the settings, for the log."""
        return self._warnings

    @property
    def target(self) -> int | None:
        """The target length in tokens; None for `auto`."""
        return None if self.target_sequence_length == "auto" else self.target_sequence_length

    @property
    def miner_wallet(self) -> tuple[str, str, Path]:
        """The miner's wallet, its hotkey, and the folder of wallets."""
        return self.wallet_miner_name, self.wallet_hotkey, self.wallet_path

    @property
    def tune_words(self) -> list[str]:
        """The words of TUNE_COMMAND."""
        return self.words_of(self.tune_command)

    def words_of(self, command: str | None) -> list[str]:
        """Return the words of a command; make the paths of this checkout's files absolute."""
        words = shlex.split(command or "")
        return [str(PROJECT / word) if (PROJECT / word).is_file() else word for word in words]

    def secrets(self) -> list[str]:
        """Return the values that must never be printed; SQLite addresses have no password."""
        values = [self.github_token, self.database_url, self.alert_url]
        texts = [value.get_secret_value() for value in values if value is not None]
        return [text for text in texts if not text.startswith("sqlite:")]
