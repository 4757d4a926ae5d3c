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
from tests.support.runc import BY_RUNTIME, RuncContainer, runc_container

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


def by_runtime(folder: Path, node: Path, value: str, settings: Path | None = None) -> Any:
    return runc_container(folder, node, {"NVIDIA_VISIBLE_DEVICES": value}, carrier=BY_RUNTIME, settings=settings)


def test_what_the_runtime_was_asked_for_is_known(node: Path, tmp_path: Path) -> None:
    with by_runtime(tmp_path, node, "0:1") as container:
        told = compared(node, container)
        prose = explain(node, container)
    comparison = told["comparison"]
    assert (comparison["absent"], comparison["unplanned"], comparison["unknown"]) == ([], [], [])
    assert len(comparison["present"]) > 20
    assert (told["asked"][0]["token"], told["carrier"]) == ("0:1", "runtime")
    assert "  planned and absent: nothing" in prose.splitlines()
    assert "What the runtime cannot do" in prose.splitlines()


def test_containers_without_a_hook_are_compared_with_what_stands_in_for_it(node: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config.yaml"
    settings.write_text(f"{(node / 'config.yaml').read_text()}runtime_hook: needed\nmask_proc: false\n")
    try:
        with by_runtime(tmp_path, node, "2", settings) as container:
            command = [*NVCT, "--config", str(settings), "explain", "--container", str(container.pid), "--json"]
            told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    finally:
        Path(cache_path(str(settings))).unlink(missing_ok=True)
    comparison = told["comparison"]
    assert told["carrier"] == "hook-free-runtime"
    assert (comparison["absent"], comparison["unplanned"], comparison["unknown"]) == ([], [], [])


def test_a_bundle_that_the_runtime_has_changed_says_what_it_asked_for(node: Path, tmp_path: Path) -> None:
    first = [*NVCT, "--config", f"{node}/config.yaml"]
    with by_runtime(tmp_path, node, "0:1") as container:
        for command in ("plan", "explain"):
            done = subprocess.run(
                [*first, command, "--bundle", str(container.bundle)], check=True, capture_output=True, text=True
            )
            assert "0:1" in done.stdout.splitlines()[0 if command == "plan" else 1]


def test_rules_of_a_spec_are_not_called_missing_in_cgroup_v2(node: Path, tmp_path: Path) -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "2"}
    with (
        CgroupV2() as group,
        runc_container(tmp_path, node, env, prefix=group.prefix, carrier=BY_RUNTIME) as container,
    ):
        told = compared(node, container, tuple(group.prefix))["comparison"]
    assert told["absent"] == []
    (unknown,) = told["unknown"]
    assert "engine's own device programs" in unknown


def test_of_a_container_that_a_spec_has_given_devices_the_request_is_not_known(node: Path, tmp_path: Path) -> None:
    """The bundle with which the runtime could tell it is gone, as it never was for an engine that reads CDI specs."""
    with by_runtime(tmp_path, node, "2") as container:
        (container.bundle / "nvct-changes.json").unlink()
        told = compared(node, container)
        lines = explain(node, container).splitlines()
        stated = json.loads(explain(node, container, "--env", "NVIDIA_VISIBLE_DEVICES=2", "--json"))
    assert told["asks_for"] == "unknown"
    assert "/dev/nvidiactl" in told["comparison"]["unplanned"]
    assert lines[0].startswith("What was asked for cannot be seen in this container")
    assert f"  there of the driver: {len(told['comparison']['unplanned'])}" in lines
    assert not any("No GPU is asked for" in line or "planned" in line for line in lines)
    assert (stated["asks_for"], stated["carrier"]) == ("devices", "cdi-spec")
    assert (stated["comparison"]["absent"], stated["comparison"]["unplanned"]) == ([], [])


def test_a_container_that_wants_nothing_and_has_nothing_is_told_so(node: Path, tmp_path: Path) -> None:
    with by_runtime(tmp_path, node, "void") as container:
        assert compared(node, container)["asks_for"] == "nothing"


def test_a_process_that_is_gone_is_told(node: Path) -> None:
    command = [*NVCT, "--config", f"{node}/config.yaml", "explain", "--container", "4194304"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "nvct: --container 4194304: there is no such process, or it has ended; expected the PID"
    )
