"""A CDI spec: by the schema of CDI's specification, of the lowest version that has what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_cdi_devices import GRAPHIC
from test_plan import LIB, NODE, VERSION
from test_plan_extras import FULL

from nvct import edits as codec
from nvct.cdi.check import problems
from nvct.cdi.devices import GPU, MODES, NAMINGS, devices_of
from nvct.cdi.spec import NodeMode, spec_of
from nvct.cdi.text import FORMATS, YAML, to_text
from nvct.errors import ChoiceError, RequestError
from nvct.model import Inventory, Roots
from nvct.record import replace
from nvct.settings import Settings

SCHEMA = json.loads((Path(__file__).parent / "data/cdi-schema.json").read_text())
VALID = jsonschema.Draft202012Validator(SCHEMA)
KIND = "nvidia.com/gpu"
HOOK = "/opt/nvct/hooks/nvct-cdi-hook"
PLAIN = replace(GRAPHIC, roots=Roots("/", "/", "/proc"))


def spec(
    mode: str = GPU,
    node: Inventory = PLAIN,
    kind: str = KIND,
    hook: str = HOOK,
    namings: tuple[str, ...] = ("index", "uuid"),
    version: str = "",
    modes: dict[str, NodeMode] | None = None,
) -> dict[str, Any]:
    devices = devices_of(mode, node, Settings(), namings, ("all",))
    return spec_of(devices, kind, hook, node.architecture, modes or {}, version)


def device(found: dict[str, Any], name: str) -> dict[str, Any]:
    (edits,) = (entry["containerEdits"] for entry in found["devices"] if entry["name"] == name)
    assert isinstance(edits, dict)
    return edits


@pytest.mark.parametrize("hook", [HOOK, ""])
@pytest.mark.parametrize("mode", MODES)
def test_every_spec_is_one_by_the_schema(mode: str, hook: str) -> None:
    found = spec(mode, hook=hook, namings=NAMINGS)
    VALID.validate(found)
    assert problems(found) == []


@pytest.mark.parametrize("form", FORMATS)
def test_text_says_just_the_spec(form: str) -> None:
    found = spec()
    text = to_text(found, form)
    assert yaml.safe_load(text) == found
    assert text.endswith("\n")
    assert form == YAML or json.loads(text) == found


ODD = ("yes", "No", "null", "~", "1:30", "0x10", "1e3", "2024-01-01", "a: b", "- x", "#c", "/etc", "e3", "a.b")
texts = st.text(max_size=10) | st.sampled_from(ODD)
scalars = st.integers() | st.booleans() | texts
# What specs are made of: no list directly in a list, and nothing empty.
lists = st.lists(scalars, min_size=1, max_size=3)
mappings = st.dictionaries(texts, scalars | lists, min_size=1, max_size=3)


@given(st.dictionaries(texts, scalars | lists | mappings | st.lists(mappings, min_size=1, max_size=3), min_size=1))
def test_any_text_survives_yaml(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_text(value, YAML)) == value


def test_nodes_are_said_with_their_numbers() -> None:
    found = spec(modes={"/dev/nvidia5": NodeMode(0o660, 0, 44), "/dev/dri/card1": NodeMode(0o600, 1000, 0)})
    usual = {"type": "c", "permissions": "rw"}
    assert device(found, "2")["deviceNodes"] == [
        {"path": "/dev/nvidia5", "major": 195, "minor": 5, "fileMode": 0o660, "gid": 44, **usual},
        {"path": "/dev/dri/card1", "major": 226, "minor": 1, "fileMode": 0o600, "uid": 1000, **usual},
        {"path": "/dev/dri/renderD129", "major": 226, "minor": 129, **usual},
    ]


def test_what_every_device_brings_is_said_once() -> None:
    found = spec()
    assert found["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    common = {node["path"] for node in found["containerEdits"]["deviceNodes"]}
    assert common == {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
    for entry in found["devices"]:
        assert "mounts" not in entry["containerEdits"]
        assert "hooks" not in entry["containerEdits"]
        assert not common & {node["path"] for node in entry["containerEdits"].get("deviceNodes", ())}


def test_mounts_carry_their_options() -> None:
    mounts = {mount["containerPath"]: mount for mount in spec()["containerEdits"]["mounts"]}
    assert mounts[f"{LIB}/libcuda.so.{VERSION}"] == {
        "hostPath": f"{LIB}/libcuda.so.{VERSION}",
        "containerPath": f"{LIB}/libcuda.so.{VERSION}",
        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
    }
    assert "rw" in mounts["/run/nvidia-persistenced/socket"]["options"]


def test_one_hook_has_all_that_a_spec_cannot_express() -> None:
    (hook,) = spec()["containerEdits"]["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["path"] == HOOK
    assert hook["args"][:2] == ["nvct-cdi-hook", "createRuntime"]
    assert hook["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    remainder = codec.from_json(json.loads(hook["args"][2]))
    assert {entry.name for entry in remainder.edits.loader_cache} >= {"libcuda.so.1", "libnvidia-ml.so.1"}
    assert remainder.pending
    assert ("/dev/nvidia5", "/dev/dri/card1", "/dev/dri/renderD129") in [case.nodes for case in remainder.pending.cases]


def test_a_hook_that_no_program_could_be_given_is_refused() -> None:
    card = PLAIN.gpus[2]
    gpus = tuple(replace(card, index=n, minor=n, uuid=f"GPU-{n:08x}-0000-4000-8000-000000000000") for n in range(1000))
    with pytest.raises(RequestError, match="bytes"):
        spec(node=replace(PLAIN, gpus=gpus))


def test_without_hooks_every_name_of_a_library_is_a_mount_in_both_families() -> None:
    found = spec(hook="")
    assert "hooks" not in found["containerEdits"]
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in found["containerEdits"]["mounts"]}
    library = f"{LIB}/libcuda.so.{VERSION}"
    assert library not in mounts
    for name in ("libcuda.so.1", "libcuda.so"):
        assert mounts[f"{LIB}/{name}"] == library
        assert mounts[f"/usr/lib64/{name}"] == library
    assert mounts["/usr/lib/i386-linux-gnu/libcuda.so.1"] == f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}"
    assert not [path for path in mounts if path.startswith("/usr/lib/libcuda")]
    assert mounts[f"/usr/lib64/libnvidia-glcore.so.{VERSION}"] == f"{LIB}/libnvidia-glcore.so.{VERSION}"
    assert mounts["/usr/lib64/vdpau/libvdpau_nvidia.so.1"] == f"{LIB}/vdpau/libvdpau_nvidia.so.{VERSION}"
    assert mounts["/usr/bin/nvidia-smi"] == "/usr/lib/nvidia/current/nvidia-smi"


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"namings": ("uuid",)}, "0.3.0"),
        ({"namings": ("type-index",)}, "0.3.0"),
        ({"namings": ("index",)}, "0.5.0"),
        ({"namings": ("uuid",), "node": replace(PLAIN, roots=Roots("/", "/run/nvidia/driver", "/proc"))}, "0.5.0"),
        ({"namings": ("uuid",), "kind": "example.com/gpu.large"}, "0.6.0"),
        ({"version": "0.7.0"}, "0.7.0"),
        ({"namings": ("uuid",), "version": "0.3.0"}, "0.3.0"),
    ],
)
def test_the_version_is_the_lowest_that_can_say_it_or_the_one_asked_for(changes: dict[str, Any], version: str) -> None:
    found = spec(**changes)
    assert found["cdiVersion"] == version
    VALID.validate(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.4.0"}, "the device name `0` begins with a digit: that needs 0.5.0"),
        ({"version": "0.4.0", "node": NODE, "namings": ("uuid",), "hook": ""}, None),
        (
            {"version": "0.3.0", "namings": ("uuid",), "node": replace(PLAIN, roots=Roots("/", "/driver", "/proc"))},
            "/dev/nvidiactl is /driver/dev/nvidiactl on the host",
        ),
        ({"version": "0.5.0", "kind": "a.b/c.d"}, "has a dot"),
        ({"version": "0.2.0"}, "'0.2.0' is no CDI version that nvct writes"),
    ],
)
def test_a_version_that_cannot_say_it(changes: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert spec(**changes)["cdiVersion"] == "0.4.0"
        return
    with pytest.raises(ChoiceError, match=reason):
        spec(**changes)


@pytest.mark.parametrize(
    "kind", ["nvidia.com", "nvidia.com/", "/gpu", "1a/gpu", "nvidia.com/gpu=0", "a_/b", "a/b/c", "a b/c"]
)
def test_a_kind_that_is_none(kind: str) -> None:
    with pytest.raises(ChoiceError, match="no kind of CDI devices"):
        spec(kind=kind)


def test_the_same_node_gives_the_same_text() -> None:
    assert to_text(spec(node=FULL), YAML) == to_text(spec(node=FULL), YAML)
