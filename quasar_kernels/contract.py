"""The fork's rules as data, and a check of a tree against them. Does not import torch.

A validator reads five files of a fork before it times the fork; a fork that breaks a rule scores
zero. `check_tree` finds every broken rule before a submission and names the remedy.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

OVERLAY = Path(__file__).resolve().parent / "overlay"
"""Root of the overlay: its files are copied over a fork byte for byte."""

FORK_IMPORTS = Path(__file__).resolve().parent / "fork_imports.json"
"""The modules that the public fork imports; scripts/record_fork_imports.py writes the file."""

QUASAR_DIR = PurePosixPath("fla/ops/quasar")
LAYER_FILE = PurePosixPath("fla/layers/quasar.py")

TARGET_FILES = (
    "chunk.py",
    "chunk_intra_token_parallel.py",
    "forward_substitution.py",
    "fused_recurrent.py",
    "gate.py",
)
"""The files of `QUASAR_DIR` that a validator reads."""

PUBLICLY_REQUIRED = (
    "autocast_custom_bwd",
    "autocast_custom_fwd",
    "autotune_cache_kwargs",
    "check_shared_mem",
    "input_guard",
)
"""The imports from `fla.utils` that the public validator requires in any fork's chunk.py."""

REQUIRED_IMPORTS = (
    "import torch",
    "import torch.nn.functional as F",
    "import triton",
    "import triton.language as tl",
    "from fla.ops.utils.index import prepare_chunk_indices",
    "from fla.ops.quasar.forward_substitution import forward_substitution_kernel",
    *(f"from fla.utils import {name}" for name in ("IS_AMD", *PUBLICLY_REQUIRED)),
)
"""Lines that the overlay's chunk.py must contain."""

FORBIDDEN_MODULES = ("fla.ops.gla", "fla.ops.kda")
"""Modules that no file of the operator may import, however the import is written."""

FORBIDDEN_TEXT = tuple(f"{how} {name}" for how in ("from", "import") for name in FORBIDDEN_MODULES)
"""Text that no target file may contain, even in comments."""

_LIBRARIES = (".so", ".o", ".a", ".dll", ".dylib", ".cubin", ".fatbin")
COMPILED = frozenset((*_LIBRARIES, ".pyc", ".pyo", ".pyd", ".whl", ".egg"))
"""Suffixes of compiled files."""

FILE_BYTES = 2**21
"""Size limit of a Python file in bytes."""


@dataclass(frozen=True)
class Violation:
    """One broken rule: the file (relative to the tree), the rule, and the remedy."""

    path: PurePosixPath
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule} {self.remedy}"


Scope = Literal["layer", "ops"]
"""The published part of the overlay: all of it, or only the files of `QUASAR_DIR`."""


def overlay_files(scope: Scope = "layer", root: Path = OVERLAY) -> list[PurePosixPath]:
    """Return the files that a scope publishes, relative to a fork's root, sorted; no byte code.

    Args:
        root: the root of the overlay, by default the shipped one.
    """
    files = sorted(
        PurePosixPath(path.relative_to(root).as_posix())
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )
    return [path for path in files if scope == "layer" or QUASAR_DIR in path.parents]


def overlay_digest(scope: Scope = "layer", root: Path = OVERLAY) -> str:
    """Return the SHA-256 over the names and contents of the files that a scope publishes."""
    digest = hashlib.sha256()
    for path in overlay_files(scope, root):
        content = (root / path).read_bytes()
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def copy_overlay(root: Path, target: Path) -> None:
    """Copy the files of the overlay at `root`, and no other files, to `target`."""
    for name in overlay_files(root=root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)


def fork_imports() -> dict[str, list[str]]:
    """Return the third-party modules that loading the public fork imports, with the imported names.

    The project's dependencies must provide them all: if one is missing, no fork can be measured.
    """
    imports: dict[str, list[str]] = json.loads(FORK_IMPORTS.read_text())["imports"]
    return imports


def check_tree(root: Path, *, strict: bool = False) -> list[Violation]:
    """Return every rule that the tree at `root` breaks; the list is empty if it breaks none.

    Args:
        strict: require every line of `REQUIRED_IMPORTS` and a CUDA source, for the overlay. The
            public validator requires fewer imports, in any spelling, and no CUDA source.
    """
    violations: list[Violation] = []
    for name in TARGET_FILES:
        violations += _check_target(root, QUASAR_DIR / name, strict)
    for path in sorted(
        filter(Path.is_file, [*(root / QUASAR_DIR).rglob("*.py"), root / LAYER_FILE])
    ):
        violations += _check_imports(root, PurePosixPath(path.relative_to(root).as_posix()), strict)
    if not (root / LAYER_FILE).is_file():
        remedy = "Set FORK_SCOPE=layer, which publishes one, or use a fork that contains one."
        violations.append(Violation(LAYER_FILE, "The layer is missing.", remedy))
    if strict and not any(_outside_git(path, root) for path in root.rglob("*.cu")):
        remedy = "Add at least one .cu file; the overlay has some."
        violations.append(Violation(QUASAR_DIR, "The tree contains no CUDA source.", remedy))
    return violations


def compiled_files(root: Path) -> list[PurePosixPath]:
    """Return the compiled files in a tree (byte code, objects, libraries), sorted."""
    return sorted(
        PurePosixPath(path.relative_to(root).as_posix())
        for path in root.rglob("*")
        if any(suffix in COMPILED for suffix in path.suffixes) and _outside_git(path, root)
    )


def _lines(text: str) -> set[str]:
    """Return the lines of a file without their comments."""
    return {line.split("#", 1)[0].strip() for line in text.splitlines()}


_IMPORTS = (ast.Import, ast.ImportFrom)


def _check_imports(root: Path, path: PurePosixPath, strict: bool) -> list[Violation]:
    """Check the imports by the syntax tree, because their text has many forms."""
    try:
        if (root / path).stat().st_size > FILE_BYTES:
            return [Violation(path, "The file is too long.", "Keep it under 2 MiB.")]
        source = (root / path).read_bytes()
        tree = ast.parse(source, path.name)  # of bytes, it finds the encoding as Python does
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # too deeply nested code raises errors without a message
        why = (
            str(error).rstrip(".") or f"{type(error).__name__}, it is too long or too deeply nested"
        )
        return [Violation(path, f"The file is not Python: {why}.", "Correct the syntax.")]
    if path == LAYER_FILE:  # the validator reads the imports of the operator only
        return []
    names = set(_imported(tree, path))
    violations = [
        Violation(path, f"The import of {banned} is forbidden.", "Remove it.")
        for banned in FORBIDDEN_MODULES
        if any(name == banned or name.startswith(f"{banned}.") for name in names)
    ]
    if strict and path == QUASAR_DIR / "chunk.py":
        imports = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, _IMPORTS)}
        violations += [
            Violation(path, f"The text {line!r} imports nothing.", "Make it a statement.")
            for line in REQUIRED_IMPORTS
            if line in _lines(source.decode("utf-8", "replace")) - imports
        ]
    return violations


def _imported(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """Yield the full names of a file's imports, relative ones and `import_module` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: -node.level] if node.level else ()
            base = ".".join(filter(None, (*package, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # a call may import a module by its name


def _outside_git(path: Path, root: Path) -> bool:
    return path.is_file() and ".git" not in path.relative_to(root).parts


def _without_comments(text: str) -> str:
    """Return the text without comments, as the public validator removes them, in lower case.

    A line's first `#` starts a comment if even numbers of single and of double quotes precede it.
    """
    lines = []
    for line in text.split("\n"):
        before, mark, _ = line.partition("#")
        quoted = before.count('"') % 2 or before.count("'") % 2
        lines.append(line if quoted or not mark else before)
    return "\n".join(lines).lower()


def _import_blocks(text: str) -> Iterator[str]:
    """Yield the imports from `fla.utils` that the public validator finds in lower-case text."""
    lines, block = text.split("\n"), list[str]()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if "from fla.utils import" in line:
            block = [line]
            if "(" not in line and ")" not in line:
                yield line
                block = []
        elif block:
            block.append(line)
            if ")" in line or (line.strip().endswith(",") and "from" in following):
                yield "\n".join(block)
                block = []


def publicly_missing(text: str) -> list[str]:
    """Return the names that the public validator requires and does not find in a chunk.py.

    It searches text and ignores case: it misses some imports and finds some that are not there.
    Source: `PerformanceValidator.validate_imports` of SILX-LABS/QUASAR-SUBNET.
    """
    text = _without_comments(text)
    blocks = list(_import_blocks(text))

    def is_found(name: str) -> bool:
        start = "from fla.utils import "
        forms = (f"{start}{name}", f"{start}({name}", f"{name},", f"{name})")
        return any(name in block for block in blocks) or any(form in text for form in forms)

    return [name for name in PUBLICLY_REQUIRED if not is_found(name)]


def _check_target(root: Path, path: PurePosixPath, strict: bool) -> list[Violation]:
    try:
        text = (root / path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return [Violation(path, "The file is missing.", "Copy it from the overlay again.")]
    except UnicodeDecodeError:
        return [Violation(path, "The file is not UTF-8 text.", "Save it as UTF-8.")]
    violations = [
        Violation(path, f"The text {banned!r} is forbidden.", "Remove it, from comments too.")
        for banned in FORBIDDEN_TEXT
        if banned in text
    ]
    if path.name == "chunk.py" and not strict:
        violations += [
            Violation(path, f"The import of {name} from fla.utils is missing.", "Add it.")
            for name in publicly_missing(text)
        ]
    elif path.name == "chunk.py":
        violations += [
            Violation(path, f"The import {line!r} is missing.", "Add it on a separate line.")
            for line in REQUIRED_IMPORTS
            if line not in _lines(text)
        ]
    return violations
