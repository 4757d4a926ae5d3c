"""`dockerd --userns-remap` with `--gpus`: containers of a real dockerd whose root is an ordinary id of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docker import DockerContainer, Dockerd, dockerd_on, why_no_dockerd
from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.userns import MAPPED

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_no_dockerd()), reason=f"dockerd cannot run here: {why_no_dockerd()}"),
]

REMAPPED = "daemon"  # a user and a group that every machine has


@pytest.fixture(scope="module")
def dockerd(folder: Path, node: SimNode) -> Iterator[Dockerd]:
    ids = folder / "subids"
    ids.write_text(f"{REMAPPED}:{MAPPED}:65536\n")
    script = f"for file in /etc/subuid /etc/subgid; do mount --bind {ids} $file; done"
    with (
        MountNamespace(script) as host,
        dockerd_on(node, folder / "docker", [f"--userns-remap={REMAPPED}"], host.prefix) as dockerd,
    ):
        yield dockerd


def numbers(node: SimNode) -> set[tuple[int, int]]:
    uvm = node.majors["nvidia-uvm"]
    return {(195, node.gpus["2"].minor), (195, 255), (uvm, 0), (uvm, 1)}


def assert_gets_gpu_2(container: DockerContainer, node: SimNode) -> None:
    assert container.seen() == [node.gpus["2"].uuid]
    assert set(container.nodes().values()) == numbers(node)
    said = container.sh("for node in /dev/nvidia*; do head -c1 $node; done")
    assert said.count("No such device or address") == len(said.splitlines()) == 4, said
    assert {f"c {major}:{minor} rw" for major, minor in numbers(node)} <= set(container.device_rules())


def test_what_a_remapped_container_gets(dockerd: Dockerd, node: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), "--gpus", "device=2") as container:
        assert (container.process / "uid_map").read_text().split() == ["0", str(MAPPED), "65536"]
        assert_gets_gpu_2(container, node)
        root = container.process / "root"
        made = [f"/{path}" for path in container.added(dockerd.image("debian"))]
        assert "/etc/ld.so.cache" in made
        for path in set(made) - set(container.mounts()):
            assert (root / path[1:]).lstat().st_uid == MAPPED, path
        shown = root / "proc/driver/nvidia"
        assert shown.stat().st_uid == MAPPED
        assert (shown / "params").stat().st_uid == MAPPED
        assert os.listdir(shown / "gpus") == [node.gpus["2"].bus]
        assert "nobody" not in container.sh("ls -l /proc/driver/nvidia")


def test_restarts_and_refusals(dockerd: Dockerd, node: SimNode) -> None:
    image = dockerd.image("debian")
    with dockerd.container(image, "--gpus", "device=2") as container:
        first = container.added(image)
        mounts = container.mounts()
        dockerd.docker("restart", "--time", "0", container.name)
        assert_gets_gpu_2(container, node)
        assert container.mounts() == mounts
        assert container.added(image) == first
    with dockerd.refused(image, "--gpus", "device=77") as (container, said):
        assert "77" in said
        assert container.added(image) == {}


def test_a_container_that_shares_the_hosts_ids(dockerd: Dockerd, node: SimNode) -> None:
    """One daemon, both kinds: the hook looks at each container."""
    with (
        dockerd.container(dockerd.image("debian"), "--gpus", "device=2", "--userns=host") as plain,
        dockerd.container(dockerd.image("debian"), "--gpus", "device=2") as remapped,
    ):
        for container, uid in ((plain, 0), (remapped, MAPPED)):
            assert_gets_gpu_2(container, node)
            assert (container.process / "root/proc/driver/nvidia").stat().st_uid == uid
