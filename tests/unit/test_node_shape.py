"""The shape of a saved inventory that someone passes: the first wrong field is named, with what was expected."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from nvct.errors import ConfigError
from nvct.model import DeviceNode, DriverFile, Gpu, Inventory, MigDevice, Roots
from nvct.node.saved import inventory_from_json, inventory_to_json
from nvct.node.shape import check_shape

MIG = MigDevice(0, "MIG-1", "1g.5gb", 7, 0, 4864, 66, 67)
GPU = Gpu(
    0,
    "GPU-1",
    2,
    "00000000:47:00.0",
    "A100",
    "Nvidia",
    "8.0",
    40960,
    True,
    (MIG,),
    (DeviceNode("/dev/dri/card1", 226, 1),),
)
INVENTORY = Inventory(
    "550.54.14",
    "12.4",
    "x86_64",
    Roots(),
    {"nvidia": 195},
    (GPU,),
    (DeviceNode("/dev/nvidiactl", 195, 255),),
    (DriverFile("library", "compute", "/usr/lib/libcuda.so.550.54.14", "libcuda.so.1", ("libcuda.so",)),),
    ("no firmware",),
    {"gds": (DeviceNode("/dev/nvidia-fs0", 500, 0),)},
    {"config": 1},
)
DELETED = object()


def saved() -> Any:
    return json.loads(json.dumps(inventory_to_json(INVENTORY)))


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value below `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in ((*path, key), *places(inner, (*path, key)))]


def changed(path: tuple[Any, ...], value: object) -> Any:
    data = copy.deepcopy(saved())
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return data


def test_what_was_saved_is_in_shape() -> None:
    check_shape(saved())
    check_shape(json.loads(json.dumps(inventory_to_json(Inventory("", "", "x86_64", Roots(), {}, kind="wsl")))))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("gpus", 0, "memory_mib"), "x", "gpus[0].memory_mib is 'x', expected a whole number"),
        (("gpus", 0, "mig_enabled"), 1, "gpus[0].mig_enabled is 1, expected true or false"),
        (("gpus", 0, "index"), True, "gpus[0].index is True, expected a whole number"),
        (("gpus", 0, "minor"), 1 << 70, "gpus[0].minor is 1180591620717411303424, expected a whole number"),
        (("gpus", 0, "bus_id"), "x", "gpus[0].bus_id is 'x', expected a PCI address such as 00000000:07:00.0"),
        (("gpus", 0, "mig_devices", 0, "gi"), None, "gpus[0].mig_devices[0].gi is None, expected a whole number"),
        (("gpus", 0, "drm_nodes"), DELETED, "gpus[0].drm_nodes is absent"),
        (("majors",), 5, "majors is 5, expected an object"),
        (("majors", "nvidia"), "x", "majors.nvidia is 'x', expected a whole number"),
        (("files", 0, "path"), 7, "files[0].path is 7, expected a line of text"),
        (("files", 0, "path"), "usr/lib/x", "files[0].path is 'usr/lib/x', expected an absolute path"),
        (("files", 0, "path"), "/a\0b", "files[0].path is '/a\\x00b', expected a line of text"),
        (("files", 0, "links"), "x", "files[0].links is 'x', expected a list"),
        (("files", 0, "kind"), "program", "files[0].kind is 'program', expected one of library, library32, "),
        (("files", 0), 7, "files[0] is 7, expected an object"),
        (("driver_version",), None, "driver_version is None, expected a line of text"),
        (("driver_version",), "new", "driver_version is 'new', expected a version such as 550.54.14"),
        (("roots",), DELETED, "roots is absent"),
        (("roots", "home"), "/", "roots.home is unknown; expected root, dev_root, proc_root"),
        (("extra_nodes", "gds"), {}, "extra_nodes.gds is an object, expected a list"),
        (("missing", 0), ["a"], "missing[0] is a list, expected a line of text"),
    ],
)
def test_the_field_that_is_wrong_is_named(path: tuple[Any, ...], value: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_shape(changed(path, value))
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("path", [path for path in places(saved()) if path != ("schema",)], ids=str)
def test_whatever_passes_can_be_read(path: tuple[Any, ...]) -> None:
    """No other value in any place gets past the check and then fails to become an inventory."""
    refused = 0
    for value in (DELETED, None, "x", "", 5, 1.5, True, [], {}, [5], {"a": 5}, "\ud800"):
        data = changed(path, value)
        try:
            check_shape(data)
        except ConfigError:
            refused += 1
            continue
        inventory = inventory_from_json(data)
        assert all(gpu.proc_name for gpu in inventory.gpus)
    assert refused >= 8


@pytest.mark.parametrize("data", [None, [], 7, "x"])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="the file is .*, expected an object"):
        check_shape(data)
