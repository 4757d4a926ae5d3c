"""nvct's runtime with a low-level runtime that starts nothing: what it makes of a bundle, and no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvct.node.cache import cache_path
from tests.support.nodes import SimNode
from tests.support.runc import nvct_runtime

NOTHING_MORE = "/bin/true"


class Editing:
    """Use by `editing`. `settings` is the file, beside which the front finds its low-level runtime."""

    def __init__(self, folder: Path, node: SimNode, lines: str = "") -> None:
        folder.mkdir()
        self.settings = folder / "config.yaml"
        self.settings.write_text(f"{node.config.read_text()}{lines}runtimes: [{NOTHING_MORE}]\n")
        (folder / "low-level-runtime").symlink_to(NOTHING_MORE)
        self._command = nvct_runtime(node.path, self.settings)

    def create(self, bundle: Path, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [*self._command, "create", "--bundle", str(bundle), "name"]
        return subprocess.run(command, capture_output=True, text=True, **options)

    def edited(self, bundle: Path, **options: Any) -> dict[str, Any]:
        """The bundle's config.json afterwards."""
        done = self.create(bundle, **options)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        spec: dict[str, Any] = json.loads((bundle / "config.json").read_text())
        return spec


@contextmanager
def editing(folder: Path, node: SimNode, lines: str = "") -> Iterator[Editing]:
    """`lines` are more of the settings file. In the end nothing is kept about the node."""
    editing = Editing(folder, node, lines)
    try:
        yield editing
    finally:
        Path(cache_path(str(editing.settings))).unlink(missing_ok=True)
