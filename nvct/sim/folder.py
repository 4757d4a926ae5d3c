"""Writing below a node's folder: files, links and folders with stated modes, whatever the umask says."""

from __future__ import annotations

import shutil
from pathlib import Path


class Folder:
    """A folder in the making. Every path is relative to it; missing parents are made with mode 0755."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def folder(self, path: str) -> Path:
        target = self.top / path
        for part in (*reversed(target.relative_to(self.top).parents), target.relative_to(self.top)):
            step = self.top / part
            if not step.is_dir():
                step.mkdir()
                step.chmod(0o755)
        return target

    def file(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        target = self._target(path)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(mode)

    def copy(self, path: str, source: Path, mode: int) -> None:
        target = self._target(path)
        shutil.copyfile(source, target)
        target.chmod(mode)

    def link(self, path: str, text: str) -> None:
        self._target(path).symlink_to(text)

    def _target(self, path: str) -> Path:
        return self.folder(str(Path(path).parent)) / Path(path).name
