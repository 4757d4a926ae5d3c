"""`nvct explain --container` looks at real containers, and sees what is there and what is not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvct.node.cache import cache_path
from nvct.sim import node as sim
from nvct.sim.profiles import spec_from_profile
from tests.support.namespaces import CgroupV2
from tests.support.runc import RuncContainer, runc_container

TREE = Path(__file__).resolve().parent.parent.parent
NVCT = (str(TREE / ".venv/bin/python"), str(TREE / "nvct/__main__.py"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers with device nodes need root"),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("explain") / "node"
    sim.create(spec_from_profile("dgx-a100", mig={0: ("1g.5gb",) * 2}), place)
    yield place
    Path(cache_path(f"{place}/config.yaml")).unlink(missing_ok=True)


def explain(node: Path, container: RuncContainer, *more: str, prefix: tuple[str, ...] = ()) -> str:
    options = ["--config", f"{node}/config.yaml", "explain", "--container", str(container.pid)]
    return subprocess.run([*prefix, *NVCT, *options, *more], check=True, capture_output=True, text=True).stdout


def compared(node: Path, container: RuncContainer, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explain(node, container, "--json", prefix=prefix))
    return found


@pytest.mark.parametrize("family", ["debian", "busybox"])
def test_all_that_a_hook_can_do_is_there(node: Path, tmp_path: Path, family: str) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "0:1", "SECRET": "hunter2"}, family) as container:
        told = compared(node, container)
    comparison = told["comparison"]
    assert [each["what"] for each in comparison["absent"]] == ["NVIDIA_VISIBLE_DEVICES"]
    assert (comparison["unplanned"], comparison["unknown"]) == ([], [])
    looked_at = [change for change in told["changes"] if change["kind"] != "stale"]
    assert len(comparison["present"]) + 1 == len(looked_at) > 20
    assert told["asked"][0]["token"] == "0:1"
    assert "hunter2" not in json.dumps(told)


def test_what_is_missing_and_what_is_too_much_is_seen(node: Path, tmp_path: Path) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "2"}, "debian") as container:
        inside = ["nsenter", "-t", str(container.pid), "-m", "/usr/bin/busybox"]
        library = next(point for point in container.mounts() if "/libnvidia-cfg.so." in point)
        subprocess.run([*inside, "umount", library], check=True)
        subprocess.run([*inside, "rm", "/etc/ld.so.cache"], check=True)
        container.sh("mknod /dev/nvidia77 c 195 77")
        told = compared(node, container)["comparison"]
        prose = explain(node, container)
    absent = {each["what"]: each["fault"] for each in told["absent"]}
    assert absent[library] == "another file is there"
    assert absent["libcuda.so.1 (64-bit)"] == "the loader cache does not have it"
    assert told["unplanned"] == ["/dev/nvidia77"]
    assert f"    {library} (mounts): another file is there" in prose.splitlines()
    assert "    /dev/nvidia77" in prose.splitlines()


def test_a_device_rule_that_was_taken_away_is_seen(node: Path, tmp_path: Path) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "2"}) as container:
        if not Path("/sys/fs/cgroup/devices/devices.allow").exists():
            pytest.skip("no cgroup v1 devices controller is mounted")
        deny_control_node(container)
        told = compared(node, container)["comparison"]
    absent = {each["what"]: each["fault"] for each in told["absent"]}
    assert absent["/dev/nvidiactl"] == "the node is there, its device rule 195:255 is not"


def deny_control_node(container: RuncContainer) -> None:
    for line in Path(f"/proc/{container.pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "devices":
            Path(f"/sys/fs/cgroup/devices{path}/devices.deny").write_text("c 195:255 rw")


def test_device_rules_of_cgroup_v2_are_seen(node: Path, tmp_path: Path) -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "2"}
    with CgroupV2() as group, runc_container(tmp_path, node, env, prefix=group.prefix) as container:
        told = compared(node, container, tuple(group.prefix))["comparison"]
    assert [each["what"] for each in told["absent"]] == ["NVIDIA_VISIBLE_DEVICES"]
    assert told["unknown"] == []
    assert {"kind": "devices", "what": "/dev/nvidiactl"} in told["present"]


def test_a_container_without_a_request_that_has_a_gpu_is_seen(node: Path, tmp_path: Path) -> None:
    with runc_container(tmp_path, node, {}) as container:
        container.sh("mknod /dev/nvidia3 c 195 3")
        told = compared(node, container)
    assert told["asks_for"] == "nothing"
    assert told["comparison"]["unplanned"] == ["/dev/nvidia3"]


def test_a_process_that_is_gone_is_told(node: Path) -> None:
    command = [*NVCT, "--config", f"{node}/config.yaml", "explain", "--container", "4194304"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == "nvct: /proc/4194304/environ: No such file or directory\n"
