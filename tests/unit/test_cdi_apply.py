"""CDI edits onto an OCI spec: as the applier that the tests have of their own, and where an engine must do more."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvct.cdi import registry
from nvct.cdi.apply import apply, edits_of
from nvct.errors import RequestError
from nvct.sim.bundle import config
from tests.support.cdi_applier import apply_cdi
from tests.support.runc import TREE

SPEC = {
    "cdiVersion": "0.7.0",
    "kind": "example.com/nic",
    "containerEdits": {
        "env": ["A=1", "PATH=/opt/bin:/usr/bin"],
        "mounts": [
            {"hostPath": "/opt/lib/x", "containerPath": "/usr/lib/x", "options": ["ro", "rbind"]},
            {"hostPath": "/opt", "containerPath": "/opt", "options": ["ro", "rbind"]},
        ],
        "hooks": [{"hookName": "createRuntime", "path": "/bin/true", "args": ["true", "x"], "env": ["A=1"]}],
        "additionalGids": [0, 44],
    },
    "devices": [
        {
            "name": "a",
            "containerEdits": {
                "env": ["A=2"],
                "deviceNodes": [
                    {"path": "/dev/nic", "hostPath": "/dev/null"},
                    {"path": "/dev/zero", "type": "c", "major": 1, "minor": 5, "fileMode": 0o600, "permissions": "r"},
                ],
            },
        },
        {"name": "b", "containerEdits": {"deviceNodes": [{"path": "/dev/nic", "hostPath": "/dev/full"}]}},
    ],
}


def oci() -> dict[str, Any]:
    made: dict[str, Any] = config(["true"], {"A": "0"}, {})
    made["mounts"].append({"destination": "/opt", "type": "tmpfs", "source": "tmpfs"})
    made["linux"]["devices"] = [{"path": "/dev/nic", "type": "c", "major": 1, "minor": 1}]
    made["future"] = {"kept": True}
    return made


def edited(folder: Path, *names: str, spec: dict[str, Any] | None = None) -> dict[str, Any]:
    file = folder / "spec.json"
    file.write_text(json.dumps(spec or SPEC))
    devices = registry.resolve(registry.load([str(folder)]), [f"example.com/nic={name}" for name in names])
    return apply(oci(), edits_of(devices))


@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b"), ("b", "a"), ()])
def test_the_tests_own_applier_does_the_same(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = edited(tmp_path, *names)
    expected = oci()
    apply_cdi(expected, [tmp_path / "spec.json"], [f"example.com/nic={name}" for name in names])
    assert found == expected


def test_it_changes_nothing_in_place(tmp_path: Path) -> None:
    edited(tmp_path, "a")
    given = oci()
    before = copy.deepcopy(given)
    devices = registry.resolve(registry.load([str(tmp_path)]), ["example.com/nic=a"])
    once = apply(given, edits_of(devices))
    assert given == before
    assert apply(once, edits_of(devices)) == once


def test_the_device_is_the_processs_users_where_nobody_says_otherwise(tmp_path: Path) -> None:
    node = {"path": "/dev/null", "type": "c", "major": 1, "minor": 3}
    given = oci()
    given["process"]["user"] = {"uid": 1000, "gid": 7}
    edits = [{"deviceNodes": [node, {**node, "path": "/dev/n", "uid": 0, "gid": 0}]}]
    ours, theirs = apply(given, edits)["linux"]["devices"][-2:]
    assert (ours["uid"], ours["gid"]) == (1000, 7)
    assert (theirs["uid"], theirs["gid"]) == (0, 0)


@pytest.mark.parametrize(("permissions", "access"), [(None, "rwm"), ("r", "r"), ("", "rwm"), ("none", None)])
def test_rules(permissions: str | None, access: str | None) -> None:
    node: dict[str, Any] = {"path": "/dev/null", "type": "c", "major": 1, "minor": 3}
    if permissions is not None:
        node["permissions"] = permissions
    rules = apply(oci(), [{"deviceNodes": [node]}])["linux"]["resources"]["devices"][1:]
    assert [rule["access"] for rule in rules] == ([access] if access else [])


def test_a_hook_without_an_env_is_given_one() -> None:
    """It would get that of the image where it runs in the container."""
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["x"], "timeout": 5}
    (found,) = apply(oci(), [{"hooks": [hook]}])["hooks"]["createContainer"]
    assert found.pop("env") == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    assert found == {"path": "/usr/bin/nvidia-cdi-hook", "args": ["x"], "timeout": 5}


def test_cache_monitoring_and_network_devices() -> None:
    edits = [{"intelRdt": {"closID": "a"}, "netDevices": [{"hostInterfaceName": "eth1", "name": "nic"}]}]
    linux = apply(oci(), edits)["linux"]
    assert (linux["intelRdt"], linux["netDevices"]) == ({"closID": "a"}, {"eth1": {"name": "nic"}})


def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(RequestError, match="^/nowhere/nic: No such file or directory, though a CDI spec"):
        apply(oci(), [{"deviceNodes": [{"path": "/dev/nic", "hostPath": "/nowhere/nic"}]}])
    with pytest.raises(RequestError, match="^/etc/hostname is no device node"):
        apply(oci(), [{"deviceNodes": [{"path": "/etc/hostname"}]}])


def test_another_shape_is_refused() -> None:
    with pytest.raises(RequestError, match="`mounts` in config.json is 'x'"):
        apply({**oci(), "mounts": "x"}, [{"mounts": [{"hostPath": "/a", "containerPath": "/b"}]}])


def test_the_program_that_hands_it_over(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    told = {"spec": oci(), "names": ["example.com/nic=a"], "folders": [str(tmp_path)]}
    command = [sys.executable, "-I", str(TREE / "nvct/cdi/handover.py")]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == edited(tmp_path, "a")
    told["names"] = ["example.com/nic=z"]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 1
    assert done.stderr.startswith("nvct: `example.com/nic=z`: ")
