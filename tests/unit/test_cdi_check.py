"""What is no CDI spec, and what a spec says that is not so here."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cdi_spec import VALID

from nvct.cdi.check import problems, untruths

GOOD: dict[str, Any] = {
    "cdiVersion": "1.1.0",
    "kind": "example.com/thing.small",
    "annotations": {"a": "b"},
    "devices": [
        {
            "name": "0:1",
            "annotations": {"c": "d"},
            "containerEdits": {
                "env": ["A=b=c", "EMPTY="],
                "deviceNodes": [
                    {"path": "/dev/a"},
                    {
                        "path": "/dev/b",
                        "hostPath": "/dev/c",
                        "type": "c",
                        "major": 1,
                        "minor": 3,
                        "fileMode": 438,
                        "permissions": "rwm",
                        "uid": 0,
                        "gid": 44,
                    },
                ],
                "mounts": [{"hostPath": "tmpfs", "containerPath": "/a", "type": "tmpfs", "options": ["ro"]}],
                "hooks": [
                    {"hookName": "poststop", "path": "/bin/true", "args": ["true", ""], "env": ["A=b"], "timeout": 3}
                ],
                "additionalGids": [44],
                "intelRdt": {"closID": "a", "schemata": ["L3:0=f"], "enableMonitoring": True},
                "netDevices": [{"hostInterfaceName": "eth0", "name": "eth1"}],
            },
        },
        {"name": "a", "containerEdits": {"env": ["X=y"]}},
    ],
    "containerEdits": {},
}


FIELDS = ("cdiVersion", "kind", "devices", "name", "containerEdits", "env", "hooks", "mounts", "deviceNodes")


def test_a_spec_with_everything_is_valid() -> None:
    VALID.validate(GOOD)
    assert problems(GOOD) == []


def first(spec: dict[str, Any]) -> dict[str, Any]:
    edits = spec["devices"][0]["containerEdits"]
    assert isinstance(edits, dict)
    return edits


# The change → what is said of it. These are wrong by the schema, too.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no version": (lambda s: s.pop("cdiVersion"), "cdiVersion: missing"),
    "version": (lambda s: s.update(cdiVersion="1"), "cdiVersion: '1', expected a version"),
    "version as a number": (lambda s: s.update(cdiVersion=1.0), "cdiVersion: 1.0, expected"),
    "kind": (lambda s: s.update(kind="gpu"), "kind: 'gpu', expected VENDOR/CLASS"),
    "kind with a digit": (lambda s: s.update(kind="example.com/1"), "kind: 'example.com/1', expected"),
    "annotations": (lambda s: s.update(annotations={"a": 1}), "annotations: {'a': 1}, expected"),
    "stranger": (lambda s: s.update(vendor="x"), "vendor: no such field; the spec has cdiVersion, kind"),
    "no devices": (lambda s: s.update(devices=[]), "devices: the list is empty"),
    "devices": (lambda s: s.update(devices={}), "devices: expected a list"),
    "device": (lambda s: s["devices"].append("x"), "devices[2]: expected a mapping"),
    "device name": (lambda s: s["devices"][0].update(name="a/b"), "devices[0].name: 'a/b', expected letters"),
    "no edits": (lambda s: s["devices"][0].pop("containerEdits"), "devices[0].containerEdits: missing"),
    "empty edits": (
        lambda s: s["devices"][1].update(containerEdits={}),
        "containerEdits: `a` brings nothing",
    ),
    "env": (lambda s: first(s).update(env=["A"]), "devices[0].containerEdits.env[0]: 'A', expected NAME=VALUE"),
    "env without a name": (lambda s: first(s).update(env=["=a"]), "env[0]: '=a', expected"),
    "node path": (
        lambda s: first(s)["deviceNodes"][0].update(path="dev/a"),
        "path: 'dev/a', expected an absolute path",
    ),
    "node type": (lambda s: first(s)["deviceNodes"][1].update(type="x"), "type: 'x', expected one of b, c, u, p"),
    "major": (lambda s: first(s)["deviceNodes"][1].update(major="1"), "major: '1', expected a whole number"),
    "major as a switch": (
        lambda s: first(s)["deviceNodes"][1].update(major=True),
        "major: True, expected",
    ),
    "permissions": (
        lambda s: first(s)["deviceNodes"][1].update(permissions="rx"),
        "permissions: 'rx', expected",
    ),
    "mode": (lambda s: first(s)["deviceNodes"][1].update(fileMode=-1), "fileMode: -1, expected"),
    "mount": (lambda s: first(s)["mounts"][0].pop("hostPath"), "mounts[0].hostPath: missing"),
    "options": (lambda s: first(s)["mounts"][0].update(options="ro"), "mounts[0].options: expected a list"),
    "stage": (lambda s: first(s)["hooks"][0].update(hookName="start"), "hookName: 'start', expected one of prestart"),
    "hook path": (
        lambda s: first(s)["hooks"][0].update(path="true"),
        "hooks[0].path: 'true', expected",
    ),
    "gid": (lambda s: first(s).update(additionalGids=[-1]), "additionalGids[0]: -1, expected"),
    "rdt": (lambda s: first(s)["intelRdt"].update(enableCMT=1), "intelRdt.enableCMT: 1, expected true or false"),
    "net": (lambda s: first(s)["netDevices"][0].update(name=""), "netDevices[0].name: '', expected a string"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_by_the_schema_is_said_with_its_place(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    spec = copy.deepcopy(GOOD)
    change(spec)
    assert not VALID.is_valid(spec)
    assert re.search(re.escape(said), "\n".join(problems(spec)))


BEYOND: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown version": (
        lambda s: s.update(cdiVersion="9.9.9"),
        "'9.9.9', expected a version that nvct knows",
    ),
    "two devices of one name": (lambda s: s["devices"].append(s["devices"][1]), "devices[2].name: `a` is there twice"),
    "edits without any": (lambda s: s["devices"][1].update(containerEdits={"env": []}), "`a` brings nothing"),
    "too old for netDevices": (lambda s: s.update(cdiVersion="1.0.0"), "netDevices, which needs 1.1.0"),
}


@pytest.mark.parametrize(("change", "said"), BEYOND.values(), ids=BEYOND)
def test_what_no_schema_can_say_is_found_as_well(change: Callable[[dict[str, Any]], object], said: str) -> None:
    spec = copy.deepcopy(GOOD)
    change(spec)
    VALID.validate(spec)
    assert re.search(re.escape(said), "\n".join(problems(spec)))


@pytest.mark.parametrize(
    ("edits", "lowest"),
    [
        ({"env": ["A=b"]}, "0.3.0"),
        ({"mounts": [{"hostPath": "/a", "containerPath": "/b", "type": "bind"}]}, "0.4.0"),
        ({"deviceNodes": [{"path": "/dev/a", "hostPath": "/dev/b"}]}, "0.5.0"),
        ({"additionalGids": [3]}, "0.7.0"),
        ({"intelRdt": {"closID": "a"}}, "0.7.0"),
        ({"intelRdt": {"schemata": ["a"]}}, "1.1.0"),
        ({"netDevices": [{"hostInterfaceName": "a", "name": "b"}]}, "1.1.0"),
    ],
)
def test_content_needs_its_version(edits: dict[str, Any], lowest: str) -> None:
    spec = {"kind": "a/b", "devices": [{"name": "c", "containerEdits": edits}]}
    for version in ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "1.0.0", "1.1.0"):
        assert (problems({**spec, "cdiVersion": version}) == []) == (version >= lowest)


@pytest.mark.parametrize("value", [None, [], "spec", 3, {}])
def test_a_value_that_is_no_spec_at_all(value: object) -> None:
    assert not VALID.is_valid(value)
    assert problems(value)


def of_edits(edits: dict[str, Any]) -> dict[str, Any]:
    return {"cdiVersion": "1.0.0", "kind": "a/b", "devices": [{"name": "c", "containerEdits": edits}]}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"deviceNodes": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}]}, []),
        ({"deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/null"}]}, []),
        (
            {"deviceNodes": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 5}]},
            ["device c: the node /dev/null is 1:3, the spec says 1:5"],
        ),
        ({"deviceNodes": [{"path": "/dev/null", "type": "b"}]}, ["device c: /dev/null is no node of the type `b`"]),
        ({"deviceNodes": [{"path": "/dev/gone"}]}, ["device c: the node /dev/gone: No such file or directory"]),
        ({"mounts": [{"hostPath": "/etc", "containerPath": "/a"}]}, []),
        ({"mounts": [{"hostPath": "tmpfs", "containerPath": "/a", "type": "tmpfs"}]}, []),
        (
            {"mounts": [{"hostPath": "/gone", "containerPath": "/a"}]},
            ["device c: /gone is not there, and is to be mounted at /a"],
        ),
        ({"hooks": [{"hookName": "createRuntime", "path": "/bin/sh"}]}, []),
        ({"hooks": [{"hookName": "startContainer", "path": "/in/the/container"}]}, []),
        (
            {"hooks": [{"hookName": "createRuntime", "path": "/etc/passwd"}]},
            ["device c: the hook /etc/passwd is no program that can be run"],
        ),
    ],
)
def test_what_is_not_so_on_this_machine(edits: dict[str, Any], said: list[str]) -> None:
    spec = of_edits(edits)
    assert problems(spec) == []
    assert untruths(spec) == said


def test_what_devices_say_by_several_names_is_told_once(tmp_path: Path) -> None:
    spec = of_edits({"mounts": [{"hostPath": os.fspath(tmp_path / "gone"), "containerPath": "/a"}]})
    spec["devices"].append({**spec["devices"][0], "name": "d"})
    assert len(untruths(spec)) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=5),
)


@given(JSON)
def test_any_value_is_told_from_a_spec(value: object) -> None:
    assert problems(value)


@given(st.data())
def test_a_spec_that_the_schema_refuses_has_problems(data: st.DataObject) -> None:
    spec = copy.deepcopy(GOOD)
    place: Any = spec
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    if not VALID.is_valid(spec):
        assert problems(spec)
