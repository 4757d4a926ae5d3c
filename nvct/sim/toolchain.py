"""The C compiler, with a cache: what was compiled once from the same text by the same compiler is copied the next time.

The cache lies under ${XDG_CACHE_HOME:-~/.cache}/nvct/sim and may be deleted at any time. It lasts only as long as the
process where that place is another user's.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nvct.record import record
from nvct.sim.errors import SimError

SOURCES = Path(__file__).parent / "c"


@record
class Job:
    """One compilation: C files and headers of `SOURCES` by name, options, and a library to link with, if any.

    `headers` are listed only so that a change in them compiles again.
    """

    sources: tuple[str, ...]
    options: tuple[str, ...]
    headers: tuple[str, ...] = ()
    link_with: Path | None = None


class Toolchain:
    """The compiler of this machine. Raises SimError where there is none, or where it does not compile a job."""

    def __init__(self) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SimError("no C compiler in PATH (cc, gcc or clang): apt-get install gcc libc6-dev")
        self._compiler = compiler
        self._identity = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
        self._cache = _cache_folder()

    def build(self, job: Job) -> Path:
        """The compiled file, in the cache: copy it, never change it."""
        cached = self._cache / self._key(job)
        if _is_ours(cached):
            return cached
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            result = Path(folder) / "result"
            command = [self._compiler, "-std=gnu11", "-O1", "-s", *job.options, "-o", str(result)]
            command += [str(SOURCES / name) for name in job.sources]
            command += [str(job.link_with)] if job.link_with else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SimError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())[:500]}")
            result.replace(cached)
        return cached

    def _key(self, job: Job) -> str:
        digest = hashlib.sha256(self._identity)
        for name in (*job.sources, *job.headers):
            digest.update((SOURCES / name).read_bytes())
        if job.link_with:
            digest.update(job.link_with.read_bytes())
        digest.update("\0".join(job.options).encode())
        return digest.hexdigest()


def _cache_folder() -> Path:
    """The cache where this user has one, else a folder for this process alone.

    With the HOME of another user (sudo keeps it on some machines, `su` always without `-`) there is none: what others
    have put there must not be installed, and what root puts there they cannot remove.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nvct", "sim")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    private = Path(tempfile.mkdtemp(prefix="nvct-sim-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def _is_ours(path: Path) -> bool:
    return path.is_file() and path.stat().st_uid == os.geteuid()
