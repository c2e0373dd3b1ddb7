"""Copies the overlay over a fork's worktree, commits it byte for byte, and compares a commit.

Commits are written with git's plumbing, which runs no hooks, filters or signing programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from neurons.runtime.errors import Held
from neurons.runtime.git.checkout import changed_files, destination
from neurons.runtime.git.command import AUTHOR, HardenedGit, commit_environment
from quasar_kernels.contract import LAYER_FILE, OVERLAY, QUASAR_DIR, Scope, overlay_files

SUBJECT = "Lay the QuasarAttention kernels over the fork"


class Overlay:
    """The files that are copied over a fork.

    Args:
        scope: `layer` for the operator and the layer, `ops` for the operator alone.
        root: returns the folder of the files; None for the shipped ones.
    """

    def __init__(self, scope: Scope, root: Callable[[], Path] | None = None) -> None:
        self._scope, self._root = scope, root or (lambda: OVERLAY)

    @property
    def files(self) -> tuple[PurePosixPath, ...]:
        return tuple(overlay_files(self._scope, self._root()))

    def lay(self, tool: HardenedGit, tip: str) -> None:
        """Copy the files into the worktree, and undo the changes of an earlier overlay."""
        # A fixed name: a full disk or a kill leaves at most one file behind.
        part = Path(tool.rev_parse("--absolute-git-dir"), "quasar-overlay.part")
        for name, content in self._wanted(tool, tip).items():
            target = destination(tool.folder, PurePosixPath(name))
            if content is None:
                target.unlink(missing_ok=True)
                continue
            if target.is_file() and target.read_bytes() == content:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.chmod(0o644)
            part.replace(target)

    def commit(self, tool: HardenedGit, tip: str) -> str:
        """Commit the files on top of `tip`, which the index must hold; return the full hash.

        The hash is `tip` if nothing changed. The date is the parent's plus a second, so that the
        same content on the same parent has the same hash in every clone.
        """
        files = self.undone_files(tool, tip) | self._own_blobs(tool, "-w")
        gone = [name for name, blob in files.items() if blob is None]
        if gone:
            tool.update_index("--force-remove", "--", *gone)
        entries = [
            word
            for name, blob in files.items()
            if blob is not None
            for word in ("--cacheinfo", f"100644,{blob},{name}")
        ]
        tool.update_index("--add", *entries)
        tree = tool.write_tree()
        if tree == tool.rev_parse(f"{tip}^{{tree}}"):
            return tip
        seconds = int(tool.rev_list("--max-count=1", "--timestamp", tip).split()[0]) + 1
        message = f"{SUBJECT}\n\nOverlay-Digest: {_digest(self._blobs(tool, tree))}\n"
        return str(
            tool.commit_tree(tree, "-p", tip, "-m", message, env=commit_environment(seconds))
        )

    def differing(self, tool: HardenedGit, commit: str) -> list[str]:
        """Return the files that differ between the commit and the overlay.

        For a commit of another version of the overlay, the list is empty if the commit's message
        contains the digest of the files in that commit.
        """
        blobs = self._blobs(tool, commit)
        if f"\nOverlay-Digest: {_digest(blobs)}" in tool.cat_file("commit", commit):
            return []
        return [name for name, blob in self._own_blobs(tool).items() if blobs.get(name) != blob]

    def undone_files(self, tool: HardenedGit, tip: str) -> dict[str, str | None]:
        """Return the files that an earlier overlay changed and this one lacks.

        Each path maps to the hash of its blob before the overlay, or to None. An update of the
        overlay may have dropped the file, and FORK_SCOPE=ops leaves out the layer.
        """
        files = set(map(str, self.files))
        undone: dict[str, str | None] = {}
        for name in self._blobs(tool, tip).keys() - files:
            changes = iter(tool.rev_list(tip, "--", name).split())
            if _is_ours(tool, next(changes)):
                before = next((x for x in changes if not _is_ours(tool, x)), None)
                undone[name] = before and tool.probe("rev-parse", "--verify", f"{before}:{name}")
        return undone

    def refuse_dirty(self, tool: HardenedGit, tip: str) -> None:
        """Raise Held if a checkout has changes other than those of `lay`."""
        wanted = self._wanted(tool, tip)

        def is_laid(name: str) -> bool:
            path = tool.folder / name
            if wanted.get(name) is None:
                return name in wanted and not path.exists()
            return path.is_file() and path.read_bytes() == wanted[name]

        dirty = [name for name in changed_files(tool) if not is_laid(name)]
        if dirty:
            raise Held(
                f"REPO_PATH={tool.folder} has uncommitted changes: {', '.join(dirty[:10])}.",
                "Commit or remove them, or unset REPO_PATH.",
            )

    def _wanted(self, tool: HardenedGit, tip: str) -> dict[str, bytes | None]:
        """Return the contents of the overlay's files and of `undone_files`; None deletes a file."""
        root = self._root()
        ours = {str(name): (root / name).read_bytes() for name in self.files}
        undone = self.undone_files(tool, tip).items()
        return ours | {name: _blob_bytes(tool, blob) if blob else None for name, blob in undone}

    def _own_blobs(self, tool: HardenedGit, *options: str) -> dict[str, str]:
        """Return the blob hash of each overlay file by path; the option `-w` stores the blobs."""
        root, names = self._root(), self.files
        sources = [root / name for name in names]
        blobs = tool.hash_object(*options, "--no-filters", "--", *sources).split()
        return dict(zip(map(str, names), blobs, strict=True))

    def _blobs(self, tool: HardenedGit, tree: str) -> dict[str, str]:
        """Return the blob hash of each file of the kernels' folder, and of the layer, by path."""
        paths = {*map(str, self.files), str(QUASAR_DIR), str(LAYER_FILE)}
        listing = tool.ls_tree("-r", "-z", tree, "--", *sorted(paths))
        rows = [row.split("\t", 1) for row in listing.split("\0") if row]
        return {name: facts.split()[2] for facts, name in rows if facts.startswith("100")}


def _is_ours(tool: HardenedGit, commit: str) -> bool:
    """Return whether a miner made the commit from an overlay."""
    text = tool.cat_file("commit", commit)
    return f"\nauthor {AUTHOR} " in text and f"\n\n{SUBJECT}\n" in text


def _blob_bytes(tool: HardenedGit, blob: str) -> bytes:
    content = str(tool.cat_file("blob", blob)).encode("utf-8", "surrogateescape")
    # HardenedGit removes a newline at the end
    return content if len(content) == int(tool.cat_file("-s", blob)) else content + b"\n"


def _digest(blobs: dict[str, str]) -> str:
    lines = "".join(f"{blob} {name}\n" for name, blob in sorted(blobs.items()))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
