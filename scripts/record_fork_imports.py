"""Record which third-party modules and names the public fork imports when it is loaded.

    python scripts/record_fork_imports.py CHECKOUT

CHECKOUT is a clone of the fork. The script reads its packages and never runs them. It starts at the
modules that a measurement imports, and follows every import that Python certainly executes through
the fork's modules. It skips the bodies of functions, `if` and `try`, which may not be executed or
may fail. It writes quasar_kernels/fork_imports.json.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from quasar_kernels.arguments import Parser
from quasar_kernels.contract import FORK_IMPORTS

REPOSITORY = "troy12x/flash-linear-attention"
LOADED = ("fla", "fla.layers.quasar", "fla.ops.quasar.chunk")
"""The modules of a fork that a measurement imports; see harness/worker/subject/tree.py."""

Imports = dict[str, set[str]]
"""The names imported from each module; none for a plain `import`."""


def find_imports(root: Path, loaded: Sequence[str] = LOADED) -> Imports:
    """Return the imports from other distributions when Python imports `loaded` from `root`.

    Raises a FileNotFoundError if a module of the fork is missing, or a SyntaxError.
    """
    imports: Imports = {}
    own = {module.split(".")[0] for module in loaded}
    waiting, seen = list(loaded), set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if "." in module:
            waiting.append(module.rpartition(".")[0])
        path = _file(root, module)
        if path is None:
            raise FileNotFoundError(f"{root} has no module {module}")
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for target, names in _statements(ast.parse(path.read_text(), str(path)).body, package):
            top = target.split(".")[0]
            if top in own:
                submodules = [f"{target}.{name}" for name in names]
                waiting += [target, *(name for name in submodules if _file(root, name))]
            elif top not in sys.stdlib_module_names:
                imports.setdefault(target, set()).update(names)
    return imports


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def _statements(body: Sequence[ast.stmt], package: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the names of every import that is certain to be executed."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*parents, *filter(None, [node.module])] if node.level else [str(node.module)]
            yield ".".join(base), [alias.name for alias in node.names]
        elif isinstance(node, (ast.ClassDef, ast.With)):
            yield from _statements(node.body, package)


def as_json(imports: Imports, commit: str) -> str:
    """Return the file's text: the fork, its commit, and names by module, all sorted."""
    modules = {module: sorted(imports[module]) for module in sorted(imports)}
    data = {"repository": REPOSITORY, "commit": commit, "imports": modules}
    return json.dumps(data, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    args = parser.parse_args(argv)
    head = ["git", "-C", str(args.checkout), "rev-parse", "HEAD"]
    result = subprocess.run(head, capture_output=True, text=True)
    if result.returncode:
        parser.error(f"{args.checkout} is not a checkout of the fork: {result.stderr.strip()}")
    try:
        FORK_IMPORTS.write_text(as_json(find_imports(args.checkout), result.stdout.strip()))
    except (FileNotFoundError, SyntaxError) as error:
        parser.error(f"{args.checkout} is not a checkout of the fork: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
