"""CUDA forward compatibility: when the image's own libraries go before the driver's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import LIB, NODE

from nvct.model import CacheEdit, CompatFolder, ContainerRoot, Edits
from nvct.plan import plan
from nvct.record import replace
from nvct.request import request_from_env
from nvct.settings import COMPAT_DISABLED, Settings

PATH = "/usr/local/cuda/compat"
WHAT = f"CUDA forward compatibility libraries of the image ({PATH})"


def folder(version: str, note: object = "", others: tuple[str, ...] = ()) -> CompatFolder:
    text = note if isinstance(note, str) else json.dumps(note)
    return CompatFolder(PATH, ("libcuda.so.1", f"libcuda.so.{version}", *others), text)


def edits(
    compat: CompatFolder | None,
    driver: str = "550.54.15",
    capabilities: str = "compute",
    brand: str = "Tesla",
    **settings: str,
) -> Edits:
    node = replace(NODE, driver_version=driver, gpus=tuple(replace(gpu, brand=brand) for gpu in NODE.gpus))
    env = {"NVIDIA_VISIBLE_DEVICES": "2", "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    return plan(node, request_from_env(env, ContainerRoot(compat=compat)), Settings(**settings))


def paths(found: Edits) -> dict[str, str]:
    return {edit.name: edit.path for edit in found.loader_cache if edit.bits == 64}


def why_not(found: Edits) -> str:
    reasons = [item.why for item in found.left_out if item.what == WHAT]
    assert len(reasons) <= 1
    return reasons[0] if reasons else ""


def test_a_newer_branch_goes_before_the_driver() -> None:
    found = edits(folder("575.57.08", others=("libnvidia-nvvm.so.4",)))
    cuda = [edit for edit in found.loader_cache if edit.name == "libcuda.so.1" and edit.bits == 64]
    why = "forward compatibility: the image's CUDA is newer than driver 550.54.15 and fits it"
    assert cuda == [CacheEdit("libcuda.so.1", f"{PATH}/libcuda.so.1", 64, why)]
    assert paths(found)["libnvidia-nvvm.so.4"] == f"{PATH}/libnvidia-nvvm.so.4"
    # Programs that ask for the development name must get the same library.
    assert paths(found)["libcuda.so"] == f"{PATH}/libcuda.so.575.57.08"
    assert why_not(found) == ""


def test_nothing_is_mounted_from_the_container() -> None:
    plain, found = edits(None), edits(folder("575.57.08"))
    assert (found.mounts, found.links, found.devices) == (plain.mounts, plain.links, plain.devices)


@pytest.mark.parametrize(
    ("version", "driver", "note", "reason"),
    [
        ("575.57.08", "550.54.15", "", ""),
        ("550.90.07", "550.54.15", "", "only a later branch"),
        ("535.54.03", "550.54.15", "", "only a later branch"),
        ("999.1", "1000.1.1", "", "only a later branch"),
        ("1000.1", "999.1", "", ""),
        ("575.57.08", "550.54.15", {"Driver": [535, 550, 570]}, ""),
        ("575.57.08", "550.54.15", {"Driver": ["535", "550"]}, ""),
        ("575.57.08", "545.29.06", {"Driver": [535, 550, 570]}, "fits the drivers 535, 550, 570, not 545"),
        ("550.90.07", "550.54.15", {"Driver": [550]}, ""),
        ("550.54.15", "550.54.15", {"Driver": [550]}, "only a later one"),
        ("575.57.08", "550.54.15", "{", "not understood: `{`"),
        ("575.57.08", "550.54.15", "[550]", "not understood"),
        ("575.57.08", "550.54.15", {"Driver": 550}, "not understood"),
        ("575.57.08", "550.54.15", "[" * 3000, "not understood"),
        ("575.57.beta", "550.54.15", "", "`575.57.beta` is no driver version"),
        ("1.1", "550.54.15", "", "`1.1` is no driver version"),
        ("575.57.08", "1.1", "", "`1.1` is no driver version"),
    ],
)
def test_versions_are_compared_as_numbers(version: str, driver: str, note: object, reason: str) -> None:
    found = edits(folder(version, note), driver)
    assert reason in why_not(found)
    assert bool(why_not(found)) == bool(reason)
    assert paths(found)["libcuda.so.1"] == (f"{LIB}/libcuda.so.1" if reason else f"{PATH}/libcuda.so.1")


def test_several_or_no_versions_are_not_chosen_among() -> None:
    two = CompatFolder(PATH, ("libcuda.so.1", "libcuda.so.570.1.1", "libcuda.so.575.57.08"))
    assert "found 2" in why_not(edits(two))
    assert "found 0" in why_not(edits(CompatFolder(PATH, ("libcuda.so.1",))))


@pytest.mark.parametrize(
    ("brand", "used"), [("GeForce", False), ("GeForceRTX", False), ("TITAN", False), ("Tesla", True), ("Nvidia", True)]
)
def test_it_is_for_data_centre_gpus(brand: str, used: bool) -> None:
    assert ("data-centre" not in why_not(edits(folder("575.57.08"), brand=brand))) == used


def test_it_can_be_switched_off() -> None:
    found = edits(folder("575.57.08"), cuda_compat=COMPAT_DISABLED)
    assert why_not(found) == "cuda_compat is disabled in the settings"
    assert found.loader_cache == edits(None).loader_cache


@pytest.mark.parametrize("capabilities", ["utility", "graphics"])
def test_without_cuda_it_is_of_no_use(capabilities: str) -> None:
    found = edits(folder("575.57.08"), capabilities=capabilities)
    assert PATH not in str(found)


def test_32_bit_programs_keep_the_drivers_library() -> None:
    found = edits(folder("575.57.08"), capabilities="compute,compat32")
    narrow = [edit.path for edit in found.loader_cache if edit.bits == 32 and edit.name == "libcuda.so.1"]
    assert narrow == ["/usr/lib/i386-linux-gnu/libcuda.so.1"]


@given(version=st.text(max_size=12), driver=st.sampled_from(["550.54.15", "1.1"]), note=st.text(max_size=40))
def test_hostile_facts_make_no_error(version: str, driver: str, note: str) -> None:
    found = edits(folder(version, note), driver)
    assert paths(found)["libcuda.so.1"] in (f"{LIB}/libcuda.so.1", f"{PATH}/libcuda.so.1")
