"""Parsers and readers of the driver's /proc files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_tree import ACCESS, GPUS, MAJORS, VERSION, NodeTree, capability, information, write

from nvct.errors import DriverError
from nvct.node import procfs

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.56  Tue Feb 23 23:31:43 UTC 2021\nGCC version: gcc 9.3.0\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (build@host)  Tue Mar 5\n"
    "GCC version:\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path, nvml=b"")


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "460.56"), (OPEN, "550.54.15")])
def test_the_version_is_found_in_both_modules_words(text: str, version: str) -> None:
    assert procfs.parse_driver_version(text) == version


@pytest.mark.parametrize("text", ["", "GCC version: 12.2.0\n", "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n"])
def test_a_text_without_a_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NVRM version"):
        procfs.parse_driver_version(text)


def test_majors_are_those_of_nvidia_character_devices() -> None:
    text = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n507 nvidia-uvm\n\nBlock devices:\n259 nvidia-disk\n"
    assert procfs.parse_majors(text) == {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 507}


def test_the_old_name_of_the_gpus_major_counts_too() -> None:
    assert procfs.parse_majors("Character devices:\n195 nvidia-frontend\n")["nvidia"] == 195


def test_a_name_may_hold_blanks_commas_and_colons() -> None:
    text = information("GPU-aa", 3, model="GeForce GTX: 1080,  Ti\tX")
    assert procfs.parse_information(text) == procfs.GpuInformation("GeForce GTX: 1080,  Ti\tX", "GPU-aa", 3)


@pytest.mark.parametrize(
    ("text", "line"), [("Model: x\nDevice Minor: 0\n", "GPU UUID"), ("GPU UUID: GPU-a\nDevice Minor: x\n", "Minor")]
)
def test_information_without_a_needed_line_is_refused(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        procfs.parse_information(text)


def test_the_capability_minor_is_found() -> None:
    assert procfs.parse_capability_minor(capability(21)) == 21


@given(st.text())
def test_parsers_raise_nothing_but_value_errors(text: str) -> None:
    assert all(name.startswith("nvidia") for name in procfs.parse_majors("Character devices:\n" + text))
    for parse in (procfs.parse_driver_version, procfs.parse_information, procfs.parse_capability_minor):
        try:
            assert parse(text) is not None
        except ValueError as error:
            assert str(error).startswith("no line")


@given(st.text(st.characters(exclude_characters="\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")), st.integers(0, 255))
def test_any_model_comes_back_as_the_rest_of_its_line(model: str, minor: int) -> None:
    found = procfs.parse_information(information("GPU-a", minor, model))
    assert (found.model, found.minor) == (model.strip(), minor)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=5))
def test_a_version_is_two_or_three_numbers(numbers: list[int]) -> None:
    assert procfs.is_version(".".join(map(str, numbers))) == (len(numbers) in (2, 3))


def test_readers_find_their_files(tree: NodeTree) -> None:
    proc = str(tree.proc)
    name, uuid, minor = GPUS[0]
    assert procfs.read_driver_version(proc) == VERSION
    assert procfs.read_majors(proc) == MAJORS
    assert procfs.read_information(proc, name).uuid == uuid
    assert procfs.read_information(proc, name).minor == minor
    assert list(procfs.read_gpu_times(proc)) == ["0000:07:00.0", "0000:47:00.0"]
    assert procfs.read_capability_minor(proc, procfs.ci_access(0, 9, 0)) == ACCESS["gpu0/mig/gi9/ci0/access"]
    assert procfs.read_capability_minor(proc, procfs.gi_access(0, 9)) == ACCESS["gpu0/mig/gi9/access"]
    assert procfs.read_boot_id(proc) == "5f9c6c1e-0000-4000-8000-000000000000"


def test_access_times_are_of_every_capability_file(tree: NodeTree) -> None:
    write(tree.proc / "driver/nvidia/capabilities/mig/config", capability(1))
    times = procfs.read_access_times(str(tree.proc))
    assert set(times) == set(ACCESS)
    file = tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi9/ci0/access"
    assert times["gpu0/mig/gi9/ci0/access"] == file.stat().st_ctime_ns


def test_without_a_driver_there_are_no_gpus_and_no_capabilities(tmp_path: Path) -> None:
    assert procfs.read_gpu_times(str(tmp_path)) == {}
    assert procfs.read_access_times(str(tmp_path)) == {}


def test_a_file_that_is_not_understood_is_named(tree: NodeTree) -> None:
    path = write(tree.proc / "driver/nvidia/version", "something else\n")
    with pytest.raises(DriverError, match=str(path)):
        procfs.read_driver_version(str(tree.proc))
