"""The kernel's part in a simulated node: its containers see the node's /proc/driver.

A real kernel shows /proc/driver/nvidia in every procfs. Here a helper that runs before nvct's hook binds the node's
proc/driver over the container's, in the container's mount namespace. It is no part of nvct: it plays the kernel.
Runs as a hook, so nothing heavy is imported.
"""

from __future__ import annotations

import os

from nvct import fastjson
from nvct.inject import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_STAGES_BEFORE_THE_HOOK = ("prestart", "createRuntime")


def show_proc(node_dir: str, pid: int, rootfs: str) -> None:
    """Make the node's proc/driver the /proc/driver of the container of `pid`, whose root file system is `rootfs`.

    `rootfs` is a path in the container's mount namespace before pivot_root. Doing it twice changes nothing. Raises
    OSError about what failed. Works in a child process, since joining a mount namespace cannot be undone.
    """
    child = os.fork()
    if child == 0:
        code = 0
        try:
            _show_proc(node_dir, pid, rootfs)
        except OSError as error:
            code = error.errno or 255
            os.write(2, f"simulated kernel: {error}\n".encode())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        raise OSError(abs(code), f"/proc/driver of the simulated node {node_dir} not shown to process {pid}", rootfs)


def _show_proc(node_dir: str, pid: int, rootfs: str) -> None:
    # Taken here, where the node's folder is visible; attached there.
    tree = syscalls.open_tree(f"{node_dir}/proc/driver", recursive=True)
    # Private before it is attached: what is mounted on it in the container must not appear in the node's folder.
    syscalls.mount_setattr(tree, 0, 0, node_dir)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.setns(namespace, syscalls.CLONE_NEWNS, f"mount namespace of process {pid}")
    where = f"{rootfs}/proc/driver"
    if os.path.lexists(f"{where}/nvct-sim"):
        return
    target = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    syscalls.move_mount(tree, target, where)


def run_hook(node: str, hook: str, arguments: list[str]) -> NoReturn:
    """Play the kernel for the container on stdin, then become `hook` with the node's settings and the same stdin."""
    text = _read_all(0)
    if arguments and arguments[-1] in _STAGES_BEFORE_THE_HOOK:
        try:
            show_proc(node, *_container(fastjson.loads(text.decode())))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"simulated kernel: {type(error).__name__}: {error}") from None
    again = os.memfd_create("state")
    os.write(again, text)
    os.lseek(again, 0, os.SEEK_SET)
    os.dup2(again, 0)
    os.execv(hook, [hook, "--config", f"{node}/config.yaml", *arguments])


def _container(state: object) -> tuple[int, str]:
    """The pid and the root file system of a container, from its OCI state and its bundle."""
    if not isinstance(state, dict):
        raise ValueError("the OCI state on stdin is no JSON object")
    bundle = state["bundle"]
    with open(f"{bundle}/config.json", encoding="utf-8") as file:
        config = fastjson.loads(file.read())
    if not isinstance(config, dict):
        raise ValueError(f"{bundle}/config.json is no JSON object")
    return int(state["pid"]), os.path.realpath(os.path.join(bundle, config["root"]["path"]))


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)
