"""Loads and checks the settings; the only module that reads the environment.

A flag overrides the environment, which overrides the .env, which overrides the default. Nothing in
a .env is evaluated, expanded or executed.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections import ChainMap
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from dotenv.parser import parse_stream
from pydantic import ValidationError

from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT, expand_home, form_of

ENV_FILE = PROJECT / ".env"

Process = Literal["miner", "validator", "api", "inference"]

VARIABLES = {name.upper(): name for name in Settings.model_fields}

WITHOUT_EFFECT = {
    "MODEL_NAME": "use REFERENCE_MODEL",
    "MINER_MODEL_NAME": "no language model writes kernels; REFERENCE_MODEL is registered",
    "MINER_MAX_RETRIES": "no language model writes kernels",
    "MINER_USE_DEVICE_MAP": "no language model writes kernels",
    "USE_FULL_CONTEXT": "no language model writes kernels",
    "CONTEXT_MAX_FILES": "no language model writes kernels",
    "CONTEXT_MAX_SIZE": "no language model writes kernels",
    "BYOC_FILE_PATH": "edit quasar_kernels/overlay, or use REPO_PATH",
    "HF_TOKEN": "no gated model is downloaded",
    "DOCKER_USERNAME": "no Docker image is built",
    "DEBUG": "use LOG_LEVEL=DEBUG",
    "WALLET_NAME": "use WALLET_MINER_NAME or WALLET_VALIDATOR_NAME",
    "HOTKEY_NAME": "use WALLET_HOTKEY",
}
"""Names from older .env files, which are ignored, each with the reason or its replacement."""


def environment() -> MutableMapping[str, str]:
    """Return this process's environment, which its children inherit."""
    return os.environ


def _find_env_file(named: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the .env to read, or None; raise ConfigError if a named one is missing.

    It is also raised if the project's .env is a folder or a broken link, for example because a
    volume is not mounted: without its .env, the miner would silently run a trial.
    """
    chosen = _named_file(named, environ)
    if chosen is None:
        if not os.path.lexists(ENV_FILE):
            return None
        chosen = ENV_FILE
    if str(chosen) == os.devnull:
        return None
    if not chosen.is_file():
        found = " (a folder)" if chosen.is_dir() else ""
        if chosen.is_symlink() and not chosen.exists():
            found = " (a broken link)"
        problem = f"No settings file at {chosen}{found}."
        raise ConfigError(Problem(problem, "Copy .env.example there and fill it in."))
    return chosen


def _named_file(named: Path | None, environ: Mapping[str, str]) -> Path | None:
    return named or (Path(environ["ENV_FILE"]) if environ.get("ENV_FILE") else None)


class Sources:
    """Flags, the environment and the .env, which is read once.

    The constructor raises no error, so that commands can find a miner's state folder even if its
    settings cannot be read.

    Args:
        flags: attribute name to value; those of None or "" are ignored.
        env_file: the .env to read, or /dev/null for none. By default it is the one that the
            variable ENV_FILE names, or else the project's if it exists.
        environ: the environment; by default this process's.
    """

    def __init__(
        self,
        flags: Mapping[str, object] | None = None,
        env_file: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.flags = {key: value for key, value in (flags or {}).items() if value not in (None, "")}
        self.environ = environment() if environ is None else environ
        self.without_file = str(_named_file(env_file, self.environ)) == os.devnull
        """Whether the user named /dev/null, so that no .env is read."""
        self._path: Path | ConfigError | None
        try:
            self._path = _find_env_file(env_file, self.environ)
        except ConfigError as error:
            self._path, self._file = error, EnvFile()
        else:
            self._file = read_env_file(self._path, VARIABLES) if self._path else EnvFile()

    @property
    def path(self) -> Path | None:
        """The .env that was read, or None; raises ConfigError if a named one is missing."""
        if isinstance(self._path, ConfigError):
            raise self._path
        return self._path

    def settings(
        self, process: Process | None = None, defaults: Mapping[str, object] | None = None
    ) -> Settings:
        """Merge and check the settings.

        Args:
            process: the process; its required settings are checked, in addition to each value.
            defaults: attribute name to value, instead of the settings' own defaults.

        Raises:
            ConfigError: a line for each problem, with the variable, its value and the remedy.
        """
        known = self._file.values.keys() & VARIABLES
        sources: dict[str, dict[str, Any]] = {
            "flag": self.flags,
            "environment": {
                VARIABLES[x]: self.environ[x] for x in VARIABLES if self.environ.get(x)
            },
            str(self.path): {VARIABLES[name]: self._file.values[name] for name in known},
            "default": dict(defaults or {}),
        }
        return _build(sources, self._file, process)

    def state_dir(self) -> Path:
        """Return the state folder, even if other settings are invalid or the .env is missing."""
        candidates = (
            self.flags.get("state_dir"),
            self.environ.get("STATE_DIR"),
            self._file.values.get("STATE_DIR"),
        )
        chosen = next(filter(None, candidates), Settings.model_fields["state_dir"].default)
        try:
            return PROJECT / expand_home(Path(str(chosen)))
        except ValueError as error:
            raise ConfigError(Problem(f"STATE_DIR={error}", "Correct STATE_DIR.")) from None


def _build(
    sources: Mapping[str, dict[str, Any]], file: EnvFile, process: Process | None
) -> Settings:
    problems = list(file.problems)
    values = ChainMap(*sources.values())
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems += _field_problems(error, sources)
    missing = _missing(values, process)
    problems += [problem for name, problem in missing.items() if name not in file.unread]
    if problems:
        # the likely reason for a missing setting is a misspelt name
        misspelt = (one for one in file.ignored if one.remedy)
        raise ConfigError(*problems, *misspelt, *file.unsafe)
    settings._warnings = (*file.ignored, *file.unsafe)
    return settings


def _field_problems(error: ValidationError, sources: Mapping[str, dict[str, Any]]) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for detail in error.errors():
        name = str(detail["loc"][0])
        origin = next(source for source, values in sources.items() if name in values)
        info = Settings.model_fields[name]
        secret = "SecretStr" in str(info.annotation)
        value = "[redacted]" if secret else repr(str(sources[origin][name]))
        reason = f": {detail['ctx']['error']}" if detail["type"] == "value_error" else ""
        form = form_of(info.annotation, info.metadata)
        problem = Problem(f"{name.upper()}={value} ({origin}){reason}", f"give {form}.")
        problems.setdefault(name, problem)
    return list(problems.values())


def _missing(values: Mapping[str, Any], process: Process | None) -> dict[str, Problem]:
    """Return the settings that this process needs and lacks, by name."""
    remedies = {}
    if process in ("miner", "validator"):
        remedies["VALIDATOR_API_URL"] = "give the address of the subnet's API."
    if process == "miner" and not (values.get("repo_path") or values.get("fork_remote")):
        both = (
            "the fork is published with GITHUB_TOKEN and GITHUB_USERNAME together (or set "
            "REPO_PATH to a checkout of yours)."
        )
        remedies |= dict.fromkeys(("GITHUB_TOKEN", "GITHUB_USERNAME"), both)
    return {
        name: Problem(f"{name} is not set", remedy)
        for name, remedy in remedies.items()
        if not values.get(name.lower())
    }


@dataclass
class EnvFile:
    """The content of a .env file."""

    # name to text, without empty ones (an empty value means unset)
    values: dict[str, str] = field(default_factory=dict)
    # names that are not settings, with a similar setting as the remedy, and repeated names
    ignored: list[Problem] = field(default_factory=list)
    unsafe: list[Problem] = field(default_factory=list)  # others can read the file
    # lines that cannot be parsed; their values are not shown
    problems: list[Problem] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # the names of settings in such lines


def read_env_file(path: Path, known: Collection[str]) -> EnvFile:
    """Read `path` line by line, so that an unclosed quote hides no other line."""
    result, quoted = EnvFile(), shlex.quote(str(path))
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        result.problems.append(Problem(f"{path} is not a UTF-8 text file", "save it as UTF-8."))
        return result
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        remedy = f"give it to the user that starts this program, and chmod 600 {quoted}."
        result.problems.append(Problem(problem, remedy))
        return result
    open_quote, repeated = False, []
    places: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        for binding in parse_stream(StringIO(line)):
            if binding.error or (binding.key is not None and binding.value is None):
                open_quote |= _note_broken(result, line, f"line {number} of {path}", known)
            elif name := binding.key:
                if name in places:
                    problem = f"{name} stands in lines {places[name]} and {number} of {path}"
                    repeated.append(Problem(problem, "the last line counts; remove the others."))
                places[name] = number
                result.values.pop(name, None)
                if binding.value:
                    result.values[name] = binding.value
    if not open_quote:  # otherwise a name may be part of a value that was meant to span lines
        result.ignored += [_explain(name, known) for name in result.values if name not in known]
        result.ignored += repeated
    if path.stat().st_mode & 0o077:
        result.unsafe.append(Problem(f"others can read {path}", f"chmod 600 {quoted}"))
    return result


def _note_broken(result: EnvFile, line: str, where: str, known: Collection[str]) -> bool:
    """Add the problem of a line that cannot be parsed; return whether it leaves a quote open.

    The problem names only known settings, because another word may be part of a secret.
    """
    begun = re.match(r"\s*(?:export\s+)?(\w+)\s*=\s*[\"']?", line)
    quote = begun[0][-1] if begun and begun[0][-1] in "\"'" else ""
    if begun is None or begun[1] not in known:
        remedy = "write NAME=value, its quotes closed."
        result.problems.append(Problem(f"{where} cannot be read", remedy))
        return bool(quote)
    remedy = f"close the quote {quote} in its line." if quote else "correct its quotes."
    result.problems.append(Problem(f"{begun[1]} cannot be read ({where})", remedy))
    result.unread.add(begun[1])
    return bool(quote)


def _explain(name: str, known: Collection[str]) -> Problem:
    if name in WITHOUT_EFFECT:
        return Problem(f"{name} is ignored: {WITHOUT_EFFECT[name]}")
    close = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.75)
    meant = f"is {close[0]} meant?" if close else ""
    return Problem(f"{name} is not a setting and is ignored", meant)
