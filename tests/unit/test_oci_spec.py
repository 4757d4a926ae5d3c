"""Edits written into an OCI spec: what is added, what is left as it was, and that it can be taken out again."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from nvct import fastjson
from nvct.edits import HOOK_ENV
from nvct.errors import RequestError
from nvct.model import DeviceEdit, MountEdit
from nvct.oci.spec import Change, Node, difference, has, with_change, without, without_gpu_hooks
from nvct.sim.bundle import config

GPU = DeviceEdit("/dev/nvidia1", "/driver/dev/nvidia1", 195, 1, "why")
CTL = DeviceEdit("/dev/nvidiactl", "/driver/dev/nvidiactl", 195, 255, "why")
SMI = MountEdit("/driver/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", ("ro", "nosuid", "nodev"), "why")
CHANGE = Change(
    nodes=(Node(CTL, 0o666, 0, 0), Node(GPU, 0o660, 0, 44)),
    rules=(CTL, GPU),
    mounts=(SMI,),
    env={"NVIDIA_VISIBLE_DEVICES": "void"},
    hook=("/opt/nvct/hooks/nvct-cdi-hook", "nvct-cdi-hook", "createRuntime", "{}"),
)


def spec() -> dict[str, Any]:
    """One as runc's own, with fields that no version of nvct knows, and with what engines put there."""
    made: dict[str, Any] = config(["true"], {"NVIDIA_VISIBLE_DEVICES": "2"}, {"poststop": [{"path": "/bin/true"}]})
    made["future"] = {"numbers": [1, 2.5, 1 << 60], "text": "ü\u2028\ud800", "nothing": None}
    made["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024, "future": True}]
    made["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "future": 1}]
    made["linux"]["seccomp"] = {"defaultAction": "SCMP_ACT_ERRNO"}
    made["linux"]["resources"]["memory"] = {"limit": 1 << 40}
    return made


def test_everything_of_the_change_is_there_and_everything_else_stays() -> None:
    old = spec()
    before = copy.deepcopy(old)
    new = with_change(old, CHANGE)
    assert old == before
    assert new["linux"]["devices"] == [
        *before["linux"]["devices"],
        {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255, "fileMode": 0o666, "uid": 0, "gid": 0},
        {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 0o660, "uid": 0, "gid": 44},
    ]
    assert new["linux"]["resources"]["devices"] == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rw"},
        {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rw"},
    ]
    assert new["mounts"][:-1] == before["mounts"]
    assert new["mounts"][-1] == {
        "destination": "/usr/bin/nvidia-smi",
        "type": "bind",
        "source": "/driver/usr/bin/nvidia-smi",
        "options": ["bind", "private", "ro", "nosuid", "nodev"],
    }
    assert new["process"]["env"] == ["PATH=/usr/bin", "NVIDIA_VISIBLE_DEVICES=void"]
    hook = {
        "path": "/opt/nvct/hooks/nvct-cdi-hook",
        "args": ["nvct-cdi-hook", "createRuntime", "{}"],
        "env": list(HOOK_ENV),
    }
    assert new["hooks"] == {**before["hooks"], "createRuntime": [hook]}
    for parts in (("future",), ("process", "rlimits"), ("linux", "seccomp"), ("linux", "resources", "memory")):
        kept, was = new, before
        for part in parts:
            kept, was = kept[part], was[part]
        assert kept == was
    assert list(new)[: len(before)] == list(before)


def test_it_is_taken_out_again_also_through_text() -> None:
    new = with_change(spec(), CHANGE)
    changes = difference(spec(), new)
    text = fastjson.loads(fastjson.dumps(new)), fastjson.loads(fastjson.dumps(changes))
    assert text == (new, changes)
    assert has(new, changes)
    found = without(new, changes)
    assert found["hooks"].pop("createRuntime") == []
    assert found == spec()


def test_a_spec_that_an_engine_has_written_anew_has_no_change_in_it() -> None:
    changes = difference(spec(), with_change(spec(), CHANGE))
    assert not has(spec(), changes)
    partly = with_change(spec(), CHANGE)
    partly["mounts"].pop()
    assert not has(partly, changes)


def test_twice_is_once() -> None:
    once = with_change(spec(), CHANGE)
    assert with_change(once, CHANGE) == once
    assert difference(once, once) == []


def test_a_spec_that_has_next_to_nothing() -> None:
    old = {"ociVersion": "1.0.2"}
    new = with_change(old, CHANGE)
    assert [entry["path"] for entry in new["linux"]["devices"]] == ["/dev/nvidiactl", "/dev/nvidia1"]
    assert new["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert without(new, difference(old, new))["mounts"] == []


def test_what_an_engine_has_put_there_already_is_not_added_again() -> None:
    old = spec()
    theirs = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 0o600}
    mount = {"destination": SMI.target, "source": SMI.source, "type": "none", "options": ["rbind", "ro"]}
    old["linux"]["devices"].append(theirs)
    old["mounts"].append(mount)
    new = with_change(old, CHANGE)
    assert [entry for entry in new["linux"]["devices"] if entry["path"] == "/dev/nvidia1"] == [theirs]
    assert new["mounts"] == old["mounts"]
    assert without(new, difference(old, new))["linux"]["devices"] == old["linux"]["devices"]


def test_a_hook_that_went_comes_back() -> None:
    old = spec()
    old["hooks"]["prestart"] = [{"path": "/usr/bin/nvidia-container-runtime-hook"}]
    new = with_change(without_gpu_hooks(old), CHANGE)
    assert without(new, difference(old, new))["hooks"] == {**old["hooks"], "createRuntime": []}


@pytest.mark.parametrize("entry", [{"type": "c", "major": 1, "minor": 3}, {"type": "b", "major": 195, "minor": 1}])
def test_another_device_in_its_place_is_refused(entry: dict[str, Any]) -> None:
    old = spec()
    old["linux"]["devices"].append({"path": "/dev/nvidia1", **entry})
    with pytest.raises(RequestError, match="^/dev/nvidia1 is the device .* in config.json, .* remove it from"):
        with_change(old, CHANGE)


def test_a_variable_is_set_once_and_its_old_entries_come_back() -> None:
    old = spec()
    old["process"]["env"] += ["A=1", "NVIDIA_VISIBLE_DEVICES=all"]
    new = with_change(old, CHANGE)
    assert new["process"]["env"] == ["PATH=/usr/bin", "A=1", "NVIDIA_VISIBLE_DEVICES=void"]
    assert without(new, difference(old, new))["process"]["env"] == [
        "PATH=/usr/bin",
        "A=1",
        "NVIDIA_VISIBLE_DEVICES=2",
        "NVIDIA_VISIBLE_DEVICES=all",
    ]


@pytest.mark.parametrize(
    ("part", "value"),
    [("linux", []), ("process", "true"), ("mounts", {}), ("hooks", [])],
)
def test_another_shape_is_refused_with_its_name(part: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^`{part}` in config.json is .*; expected (an object|a list)"):
        with_change({**spec(), part: value}, CHANGE)


OTHERS = {"path": "/usr/bin/other", "args": ["other", "prestart"]}


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/nvidia-container-runtime-hook",
        "/usr/bin/nvidia-container-toolkit",
        "/opt/nvct/hooks/nvidia-container-runtime-hook",
        "nvidia-container-toolkit",
    ],
)
@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_a_hook_that_gives_gpus_is_removed(path: str, stage: str) -> None:
    old = spec()
    old["hooks"] |= {stage: [OTHERS, {"path": path, "args": ["prestart"]}, OTHERS]}
    before = copy.deepcopy(old)
    new = without_gpu_hooks(old)
    assert new["hooks"] == {**spec()["hooks"], stage: [OTHERS, OTHERS]}
    assert old == before


@pytest.mark.parametrize(
    "path", ["/usr/bin/nvidia-container-runtime-hooks", "/nvidia-container-toolkit/hook", "/usr/bin/nvidia-ctk", 7]
)
def test_other_hooks_stay(path: object) -> None:
    old = spec()
    old["hooks"]["prestart"] = [{"path": path}]
    assert without_gpu_hooks(old) == old


def test_the_text_is_what_json_reads() -> None:
    new = with_change(spec(), CHANGE)
    assert json.loads(fastjson.dumps(new)) == new
