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
from nvct.oci.spec import Change, Node, check_shape, difference, still_there, with_change, without, without_gpu_hooks
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
    assert still_there(new, changes) == changes
    found = without(new, changes)
    assert found["hooks"].pop("createRuntime") == []
    assert found == spec()


def test_a_spec_that_an_engine_has_written_anew_has_no_change_in_it() -> None:
    changes = difference(spec(), with_change(spec(), CHANGE))
    assert still_there(spec(), changes) == []
    answered = spec()
    answered["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=void"]  # an engine's own
    assert still_there(answered, changes) == []


def undone(new: dict[str, Any], old: dict[str, Any] | None = None, changed: Change = CHANGE) -> dict[str, Any]:
    """The spec `new`, which was made of another one by a change and then edited, without that change."""
    old = old or spec()
    changes = difference(old, with_change(old, changed))
    return without(new, still_there(new, changes))


@pytest.mark.parametrize("place", ["mounts", "devices", "rules", "hook", "env"])
def test_whatever_is_still_there_is_taken_out_though_the_rest_was_removed_by_hand(place: str) -> None:
    new = with_change(spec(), CHANGE)
    parts: dict[str, tuple[Any, Any]] = {
        "mounts": (new, "mounts"),
        "devices": (new["linux"], "devices"),
        "rules": (new["linux"]["resources"], "devices"),
        "hook": (new["hooks"], "createRuntime"),
        "env": (new["process"], "env"),
    }
    holder, key = parts[place]
    holder[key] = holder[key][:-1]
    expected = spec()
    if place == "env":
        expected["process"]["env"] = ["PATH=/usr/bin"]  # the variable is gone, as the user has it
    found = undone(new)
    found["hooks"].pop("createRuntime")
    assert found == expected


@pytest.mark.parametrize("value", ["5", "none", "void,"])
def test_a_variable_that_was_edited_by_hand_counts_as_it_is(value: str) -> None:
    new = with_change(spec(), CHANGE)
    new["process"]["env"] = ["PATH=/usr/bin", f"NVIDIA_VISIBLE_DEVICES={value}"]
    found = undone(new)
    assert found["process"]["env"] == ["PATH=/usr/bin", f"NVIDIA_VISIBLE_DEVICES={value}"]
    assert (found["mounts"], found["linux"]) == (spec()["mounts"], spec()["linux"])


def test_a_variable_that_was_added_by_hand_outweighs_the_one_that_went() -> None:
    new = with_change(spec(), CHANGE)
    new["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=5")
    assert undone(new)["process"]["env"] == ["PATH=/usr/bin", "NVIDIA_VISIBLE_DEVICES=5"]


def test_an_entry_of_ours_that_was_edited_is_the_users() -> None:
    new = with_change(spec(), CHANGE)
    new["mounts"][-1]["options"] = ["rbind"]
    found = undone(new)
    assert found["mounts"] == new["mounts"]
    assert found["linux"] == spec()["linux"]


def test_what_went_comes_back_only_where_something_of_ours_is_there() -> None:
    old = spec()
    for path, went in ((["process", "env"], "NVIDIA_VISIBLE_DEVICES=all"), (["hooks", "prestart"], {"path": "/x"})):
        assert still_there(old, [{"path": path, "came": [], "went": [went]}]) == []


def test_a_hook_that_went_comes_back_though_the_variable_was_edited() -> None:
    old = spec()
    old["hooks"]["prestart"] = [{"path": "/usr/bin/nvidia-container-runtime-hook"}]
    new = with_change(without_gpu_hooks(old), CHANGE)
    changes = difference(old, new)
    new["process"]["env"] = []
    assert without(new, still_there(new, changes))["hooks"]["prestart"] == old["hooks"]["prestart"]


def test_a_mount_that_another_one_had_replaced_comes_back_unless_there_is_a_third() -> None:
    old = {"mounts": [{"destination": "/a", "source": "/1"}]}
    new: dict[str, Any] = {"mounts": [{"destination": "/a", "source": "/2"}, {"destination": "/b", "source": "/2"}]}
    changes = difference(old, new)
    assert without(new, still_there(new, changes)) == old
    new["mounts"][0] = {"destination": "/a", "source": "/3"}
    assert without(new, still_there(new, changes)) == {"mounts": [{"destination": "/a", "source": "/3"}]}


def test_objects_that_cdi_specs_write_are_taken_out_by_their_keys() -> None:
    old: dict[str, Any] = {"linux": {"netDevices": {"eth0": {"name": "a"}}}}
    new: dict[str, Any] = {
        "linux": {"netDevices": {"eth0": {"name": "b"}, "eth1": {"name": "c"}}, "intelRdt": {"closID": "x"}}
    }
    changes = difference(old, new)
    assert without(new, still_there(new, changes)) == old
    new["linux"]["netDevices"]["eth0"] = {"name": "mine"}
    assert without(new, still_there(new, changes)) == {"linux": {"netDevices": {"eth0": {"name": "mine"}}}}


BAD_SHAPES = [
    ({"linux": "x"}, "`linux`"),
    ({"linux": {"devices": ["x"]}}, "`linux.devices`"),
    ({"linux": {"devices": [{"path": ["/dev/x"]}]}}, "`linux.devices`"),
    ({"linux": {"namespaces": 7}}, "`namespaces`"),
    ({"linux": {"namespaces": ["user"]}}, "`linux.namespaces`"),
    ({"linux": {"uidMappings": {}}}, "`uidMappings`"),
    ({"linux": {"gidMappings": [0]}}, "`linux.gidMappings`"),
    ({"linux": {"resources": []}}, "`resources`"),
    ({"linux": {"resources": {"devices": [1]}}}, "`linux.resources.devices`"),
    ({"linux": {"netDevices": []}}, "`netDevices`"),
    ({"mounts": [{"destination": "/a", "options": 7}]}, "`options`"),
    ({"mounts": [{"destination": "/a", "options": [7]}]}, "`mounts`"),
    ({"mounts": [{"destination": 7}]}, "`mounts`"),
    ({"mounts": ["/a"]}, "`mounts`"),
    ({"hooks": {"prestart": ["/a"]}}, "`hooks.prestart`"),
    ({"hooks": {"prestart": {}}}, "`prestart`"),
    ({"process": {"user": "root"}}, "`user`"),
    ({"process": {"user": {"additionalGids": 7}}}, "`additionalGids`"),
]


@pytest.mark.parametrize(("part", "name"), BAD_SHAPES)
def test_a_shape_that_no_spec_has_is_refused_in_one_line(part: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} in config.json (is|has) .*; expected .*`runc spec`") as caught:
        check_shape(part)
    assert "\n" not in str(caught.value)


def test_every_shape_that_engines_write_passes() -> None:
    check_shape(with_change(spec(), CHANGE))
    check_shape({"mounts": None, "linux": None, "process": {"env": None}})


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
