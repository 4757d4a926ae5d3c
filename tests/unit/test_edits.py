"""What specs leave to nvct's hook: its JSON, and what comes of it in a container."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct import edits, fastjson
from nvct.errors import ConfigError
from nvct.model import (
    CacheEdit,
    Case,
    CompatFolder,
    ContainerRoot,
    DeviceEdit,
    Edits,
    FileEdit,
    LeftOut,
    LinkEdit,
    MountEdit,
    Pending,
    ProcEdit,
    Remainder,
    StaleName,
)
from nvct.plan.remainder import complete
from nvct.record import replace

FOLDER = "/usr/lib/x86_64-linux-gnu"
EDITS = Edits(
    links=(LinkEdit(f"{FOLDER}/libcuda.so.1", "libcuda.so.550.54", ""),),
    loader_cache=(CacheEdit("libcuda.so.1", f"{FOLDER}/libcuda.so.1", 64, ""),),
    files=(FileEdit("/etc/a", 'text "quoted"\n', 0o444, "a reason"),),
    proc=ProcEdit("/proc/driver/nvidia", ("version",), ("0000:07:00.0",), ("gpu1/mig/gi7/access",), ""),
    stale=(StaleName(FOLDER, "libcuda.so"), StaleName(FOLDER, "libnvidia-"), StaleName("/usr/bin", "nvidia-")),
)


NAMES = ("architecture", "edits", "pending", "cases", "nodes", "links", "loader_cache", "files", "proc", "stale")


def through_text(remainder: Remainder) -> Remainder:
    return edits.from_json(fastjson.loads(json.dumps(edits.to_json(remainder))))


def proc(gpu: str, *capabilities: str) -> ProcEdit:
    return ProcEdit("/proc/driver/nvidia", ("version",), (gpu,), capabilities, "")


PENDING = Pending(
    "550.54",
    (
        Case(("/dev/nvidia1",), Edits(proc=proc("0000:07:00.0"))),
        Case(("/dev/nvidia3",), Edits(proc=proc("0000:0f:00.0"), links=(LinkEdit("/dev/l", "x", ""),)), "GeForce"),
        Case(
            ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap21"),
            Edits(proc=proc("0000:07:00.0", "gpu1/mig/gi2/access")),
        ),
    ),
    profile="capability graphics",
)
WHOLE = Remainder(EDITS, "x86_64", PENDING)


@pytest.mark.parametrize("remainder", [Remainder(EDITS, "aarch64"), WHOLE, Remainder(Edits(), "x86_64")])
def test_json_brings_everything_back(remainder: Remainder) -> None:
    assert through_text(remainder) == remainder


def test_what_a_spec_expresses_is_no_part_of_it() -> None:
    more = replace(
        EDITS,
        devices=(DeviceEdit("/dev/nvidia1", "/dev/nvidia1", 195, 1, "why"),),
        mounts=(MountEdit("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", ("ro",), "why"),),
        left_out=(LeftOut("this", "why"),),
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        warnings=("careful",),
    )
    assert through_text(Remainder(more, "x86_64")) == Remainder(EDITS, "x86_64")
    assert edits.edits_to_json(Edits(devices=more.devices, mounts=more.mounts, env=more.env)) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"edits": {}, "architecture": "x86_64", "pending": {"cases": []}},
        {"edits": {"links": []}, "architecture": "x86_64"},
        {"edits": {"loader_cache": [["a", "b"]]}, "architecture": "x86_64"},
        {"edits": {"proc": {"source": "/proc"}}, "architecture": "x86_64"},
        {"edits": {}, "architecture": "x86_64", "pending": {"driver_version": "1", "cases": [], "strange": 1}},
    ],
)
def test_json_of_another_shape_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="nvct cdi refresh"):
        edits.from_json(value)


def test_complete_edits_stay_as_they_are() -> None:
    assert complete(Remainder(EDITS, "x86_64"), ContainerRoot(musl="/lib"), {"/dev/nvidia1"}) == EDITS


@pytest.mark.parametrize(
    ("nodes", "gpus", "capabilities", "links"),
    [
        ((), ["0000:07:00.0"], ["gpu1/mig/gi7/access"], 1),
        (("/dev/nvidia3", "/dev/null"), ["0000:07:00.0", "0000:0f:00.0"], ["gpu1/mig/gi7/access"], 2),
        (("/dev/nvidia-caps/nvidia-cap21",), ["0000:07:00.0"], ["gpu1/mig/gi7/access"], 1),
        (
            ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap21"),
            ["0000:07:00.0"],
            ["gpu1/mig/gi7/access", "gpu1/mig/gi2/access"],
            1,
        ),
    ],
)
def test_what_comes_with_a_device_comes_when_all_its_nodes_are_there(
    nodes: tuple[str, ...], gpus: list[str], capabilities: list[str], links: int
) -> None:
    found = complete(WHOLE, ContainerRoot(), nodes)
    assert found.proc
    assert list(found.proc.gpus) == gpus
    assert list(found.proc.capabilities) == capabilities
    assert len(found.links) == links


@pytest.mark.parametrize(
    ("nodes", "mask"),
    [(("/dev/nvidia1",), "0x2"), (("/dev/nvidia3", "/dev/nvidia1"), "0xa"), (("/dev/nvidia7",), ""), ((), "")],
)
def test_the_profile_names_the_gpus_that_are_there(nodes: tuple[str, ...], mask: str) -> None:
    files = complete(WHOLE, ContainerRoot(), nodes).files
    assert [file.content.partition("0x")[2].partition("]")[0] for file in files[1:]] == ([mask[2:]] if mask else [])


def test_no_profile_without_a_reason() -> None:
    files = complete(replace(WHOLE, pending=replace(PENDING, profile="")), ContainerRoot(), {"/dev/nvidia1"}).files
    assert files == EDITS.files


COMPAT = ContainerRoot(compat=CompatFolder("/usr/local/cuda/compat", ("libcuda.so.1", "libcuda.so.570.10")))


@pytest.mark.parametrize(("nodes", "ours"), [(("/dev/nvidia1",), False), (("/dev/nvidia1", "/dev/nvidia3"), True)])
def test_the_images_compatibility_libraries_are_used_where_every_gpu_allows_it(
    nodes: tuple[str, ...], ours: bool
) -> None:
    cache = complete(WHOLE, COMPAT, nodes).loader_cache
    paths = {entry.name: entry.path for entry in cache}
    assert paths["libcuda.so.1"] == (f"{FOLDER}/libcuda.so.1" if ours else "/usr/local/cuda/compat/libcuda.so.1")


def test_an_image_of_another_machine_keeps_its_loader_cache() -> None:
    found = complete(WHOLE, ContainerRoot(architecture="aarch64"), ())
    assert found.loader_cache == ()
    assert "aarch64" in found.warnings[0]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
)


@given(VALUES)
def test_any_json_is_read_or_refused(value: object) -> None:
    try:
        remainder = edits.from_json(value)
    except ConfigError:
        return
    assert isinstance(remainder, Remainder)
