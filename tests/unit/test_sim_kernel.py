"""The simulation's part of the kernel: a container's /proc/driver becomes the node's, in its mount namespace only."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

# A shared root, as on machines with systemd: what is mounted in the container must not come back to the node.
_CONTAINER = """
set -e
mount --make-rshared /
mount -t proc proc {rootfs}/proc
cd {bundle}
unshare -m --propagation slave sh -c 'echo $$; exec sleep 60' > pid &
while [ ! -s pid ]; do sleep 0.01; done
pid=$(cat pid)
trap "kill $pid" EXIT
root={rootfs}
inside() {{ nsenter -m -t $pid "$@"; }}
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """As much of a node as the kernel's part reads."""
    top = tmp_path / "node"
    for name in ("nvidia", "nvct-sim"):
        (top / "proc/driver" / name).mkdir(parents=True)
    (top / "proc/driver/nvct-sim/node").write_text("format 1\n")
    (top / "proc/driver/nvidia/version").write_text("of the node\n")
    (top / "config.yaml").touch()
    return top


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "rootfs/proc").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    return folder


def in_container(bundle: Path, script: str) -> subprocess.CompletedProcess[str]:
    head = _CONTAINER.format(rootfs=bundle / "rootfs", bundle=bundle)
    command = ["unshare", "-m", "sh", "-c", head + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def play(node: Path, hook: Path, *arguments: str) -> str:
    """A shell command that runs the hook of the node with the container's state, as an engine does."""
    program = (
        f"import sys; sys.path.insert(0, {str(TREE)!r}); from nvct.sim.kernel import run_hook; "
        f"run_hook(node={str(node)!r}, hook={str(hook)!r}, arguments={list(arguments)!r})"
    )
    state = '{\\"pid\\": $pid, \\"bundle\\": \\"$PWD\\"}'
    return f'echo "{state}" | /usr/bin/python3 -IS -c "{program}"\n'


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """In the place of the real hook: prints its arguments and the state that it gets."""
    path = tmp_path / "hook"
    path.write_text('#!/bin/sh\necho "$@"\ncat\n')
    path.chmod(0o755)
    return path


def test_the_container_sees_the_nodes_driver_and_the_hook_gets_the_state(node: Path, bundle: Path, hook: Path) -> None:
    script = play(node, hook, "prestart") + "inside cat $root/proc/driver/nvidia/version; echo $pid"
    done = in_container(bundle, script)
    assert done.returncode == 0, done.stderr
    arguments, state, version, pid = done.stdout.splitlines()
    assert arguments == f"--config {node}/config.yaml prestart"
    assert json.loads(state) == {"pid": int(pid), "bundle": str(bundle)}
    assert version == "of the node"


def test_twice_is_once_and_other_namespaces_see_nothing(node: Path, bundle: Path, hook: Path) -> None:
    count = "inside grep -c ' /.*/rootfs/proc/driver ' /proc/$pid/mountinfo\n"
    script = play(node, hook, "createRuntime") + play(node, hook, "prestart") + count
    done = in_container(bundle, script + "ls rootfs/proc/driver")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[4] == "1"
    assert "nvct-sim" not in lines[5:]


def test_a_mount_in_the_container_does_not_come_back_to_the_node(node: Path, bundle: Path, hook: Path) -> None:
    mask = "inside mount -t tmpfs mask $root/proc/driver/nvidia; inside ls $root/proc/driver/nvidia; "
    done = in_container(bundle, play(node, hook, "prestart") + mask + f"cat {node}/proc/driver/nvidia/version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == ["of the node"]


def test_later_stages_only_become_the_hook(node: Path, bundle: Path, hook: Path) -> None:
    done = in_container(bundle, play(node, hook, "poststop") + "inside ls $root/proc/driver")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"--config {node}/config.yaml poststop"
    assert "nvct-sim" not in done.stdout


def test_a_container_without_proc_fails_with_the_path(node: Path, bundle: Path, hook: Path) -> None:
    done = in_container(bundle, "umount -l rootfs/proc; " + play(node, hook, "prestart"))
    assert done.returncode == 1
    assert f"{bundle}/rootfs/proc/driver" in done.stderr
    assert "simulated kernel: " in done.stderr
