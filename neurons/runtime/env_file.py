"""Reads a .env file as text: nothing in it is evaluated, expanded or executed."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from dotenv.parser import parse_stream

from neurons.runtime.errors import Problem

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


@dataclass
class EnvFile:
    """The content of a .env file."""

    # name to text, without empty ones (an empty value means unset)
    values: dict[str, str] = field(default_factory=dict)
    # names that are no settings, with a similar setting in the remedy, and repeated names
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
    if not open_quote:  # else a name may be part of a value that was meant to span lines
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
