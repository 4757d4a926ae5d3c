"""Real runc containers in user namespaces: under a root engine that maps ids, and under an ordinary user's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nvct.node.cache import RUN_DIR, cache_path
from nvct.sim import bundle as bundles
from tests.support.bare import MISSING_CALLS
from tests.support.nodes import SimNode
from tests.support.runc import PYTHON, TREE, Hook, RuncContainer, hooks_of, kernel_hook

# Root in containers with id maps; ids of the host that nobody has.
MAPPED = 100_000
MAP = [{"containerID": 0, "hostID": MAPPED, "size": 65536}]

# The host's user of rootless engines: one that exists nowhere else.
USER = 61_234

AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
# Rootless engines make a user namespace and, all but the simplest, a mount namespace for themselves.
ROOTLESS = [*AS_USER, "unshare", "--user", "--map-root-user", "--mount"]
ROOTLESS_WITHOUT_MOUNTS = [*AS_USER, "unshare", "--user", "--map-root-user"]


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="nvct-userns-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def run_folder_of(uid: int) -> Iterator[Path]:
    """/run/user/<uid>, as it is while the user is logged in."""
    folder = Path(f"/run/user/{uid}")
    folder.mkdir(mode=0o700, parents=True)
    os.chown(folder, uid, uid)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def give(folder: Path, uid: int) -> None:
    """Make the folder and all in it the user's."""
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(parent, name), uid, uid)


def make_bundle(
    folder: Path,
    hooks: Mapping[str, Sequence[Hook]],
    env: Mapping[str, str],
    owner: int,
    maps: bool = False,
    rootfs: Path | None = None,
) -> Path:
    """A new bundle below `folder` that is `owner`'s, with a new root or that of another bundle.

    `maps`: its container gets a user namespace of its own.
    """
    bundle = folder / f"bundle-{time.monotonic_ns()}"
    bundle.mkdir()
    root = rootfs or bundle / "rootfs"
    if not rootfs:
        bundles.make_rootfs(root)
    spec = bundles.config(["/usr/bin/sleep", "600"], env, hooks)
    spec["root"]["path"] = str(root)  # type: ignore[index]
    if maps:
        linux = spec["linux"]
        linux["namespaces"].append({"type": "user"})  # type: ignore[index]
        linux.update(uidMappings=MAP, gidMappings=MAP)  # type: ignore[attr-defined]
    bundles.write_config(bundle, spec)
    give(bundle, owner)
    return bundle


class RootlessContainer(RuncContainer):
    """A container of USER's engine. `runc exec` would make another user namespace, which can join no other's."""

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.pid), "--user", "--mount", "--pid", "--net", "--ipc", "--uts"]
        command = [*AS_USER, *enter, "--preserve-credentials", *args]
        return subprocess.run(command, capture_output=True, text=True, check=check)


@contextmanager
def running(
    bundle: Path,
    prefix: Sequence[str] = (),
    kind: type[RuncContainer] = RuncContainer,
    runtime: Sequence[str] = ("runc",),
) -> Iterator[RuncContainer]:
    """The bundle's container while it runs. Raises StartFailed."""
    container = kind(bundle, prefix=prefix, runtime=runtime)
    try:
        yield container
    finally:
        container.delete()


@contextmanager
def mapped_container(
    folder: Path,
    node: Path,
    env: Mapping[str, str],
    hooks: Mapping[str, Sequence[Hook]] | None = None,
    rootfs: Path | None = None,
) -> Iterator[RuncContainer]:
    """A container of a root engine, whose root is the host's uid MAPPED."""
    with running(make_bundle(folder, hooks or hooks_of(node), env, MAPPED, True, rootfs)) as container:
        yield container


@contextmanager
def rootless_container(
    folder: Path,
    node: Path,
    env: Mapping[str, str],
    hooks: Mapping[str, Sequence[Hook]] | None = None,
    prefix: Sequence[str] = ROOTLESS,
) -> Iterator[RuncContainer]:
    """A container of USER's engine."""
    with running(make_bundle(folder, hooks or hooks_of(node), env, USER), prefix, RootlessContainer) as container:
        yield container


class Hooks:
    """Makes the hooks of containers on a node: the kernel's part, then nvct's, whose standard error is kept.

    Use as a context manager: what they keep of the node outside of it is removed in the end.
    """

    def __init__(self, folder: Path, node: SimNode) -> None:
        self.node = node
        self.log = folder / f"hooks-{time.monotonic_ns()}.log"
        self.log.touch()
        self.log.chmod(0o666)
        self._configs = [node.config]

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        print(self.said())  # which pytest shows of a test that fails
        for config in self._configs:
            for run_dir in (RUN_DIR, f"/tmp/nvct-{USER}"):
                Path(cache_path(str(config), run_dir)).unlink(missing_ok=True)
        shutil.rmtree(f"/tmp/nvct-{USER}", ignore_errors=True)

    def __call__(
        self,
        kernel: str = "today",
        settings: Mapping[str, object] | None = None,
        under: Sequence[str] = (),
        env: Sequence[str] = (),
        program: str = "",
        shown: str | None = "the node's",
        config: Path | None = None,
    ) -> dict[str, list[Hook]]:
        """`kernel`: its age, of MISSING_CALLS. `settings`: beside those of the node. `under`: a command that runs the
        hook. `program`: Python that runs in the hook first. `shown`: the folder whose proc/driver containers see as
        theirs; None: the kernel shows none. `config`: another settings file than the node's.
        """
        config = config or self.node.config
        if settings:
            config = config.with_name(f"config-{time.monotonic_ns()}.yaml")
            config.write_text(
                self.node.config.read_text()
                + "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
            )
            self._configs.append(config)
        command = [
            *under,
            PYTHON,
            "-I",
            "-S",
            "-c",
            _HOOK.format(tree=TREE, missing=MISSING_CALLS[kernel], program=program),
        ]
        arguments = ["sh", "-c", 'exec "$@" 2>>"$0"', str(self.log), *command, "--config", str(config), "prestart"]
        own: Hook = {"path": "/bin/sh", "args": arguments, "env": list(env)}
        if shown is None:
            return {"prestart": [own]}
        return {"prestart": [kernel_hook(self.node.path if shown == "the node's" else shown), own]}

    def said(self) -> str:
        """What nvct's hooks have written to standard error."""
        return self.log.read_text()


_HOOK = """
import sys
sys.path.insert(0, "{tree}")
from nvct.inject import syscalls
for name in {missing!r}:
    syscalls._number[name] = 1 << 20
{program}
from nvct.oci.hook import main
sys.exit(main(sys.argv[1:]))
"""
