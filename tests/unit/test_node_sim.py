"""Discovery against whole simulated nodes: what the node was made of is what the inventory says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct import settings
from nvct.errors import DriverError, StaleInventory
from nvct.model import BINARY, FIRMWARE, LIBRARY, NATIVE, Inventory
from nvct.node import cache, procfs
from nvct.node.current import current
from nvct.node.discover import discover
from nvct.node.recheck import recheck
from nvct.record import replace
from nvct.sim.errors import SimError
from nvct.sim.node import Made, create, refuse_real_driver, spec_from_profile
from nvct.sim.profiles import PROFILES
from nvct.sim.spec import NodeSpec, NvmlBehaviour

try:
    refuse_real_driver()
except SimError as error:
    pytest.skip(str(error), allow_module_level=True)

SEVEN = ("1g.5gb",) * 7
MIXED = ("3g.20gb", "2g.10gb", "1g.5gb")


def dgx() -> NodeSpec:
    return spec_from_profile("dgx-a100", mig={0: SEVEN, 1: MIXED})


def discovered(spec: NodeSpec, folder: Path) -> tuple[Made, Inventory]:
    made = create(spec, folder / "node")
    return made, discover(settings.load(made.config))


@pytest.mark.parametrize("name", sorted(name for name in PROFILES if PROFILES[name].kind == NATIVE))
def test_every_profile_is_discovered_as_it_was_made(tmp_path: Path, name: str) -> None:
    spec = spec_from_profile(name)
    _, inventory = discovered(spec, tmp_path)
    assert (inventory.driver_version, inventory.cuda_version) == (spec.driver, spec.cuda)
    assert [(gpu.index, gpu.uuid, gpu.minor, gpu.bus_id.lower()) for gpu in inventory.gpus] == [
        (index, gpu.uuid, gpu.minor, gpu.bus_id.lower()) for index, gpu in enumerate(spec.gpus)
    ]
    assert [(gpu.model, gpu.compute_capability, gpu.memory_mib) for gpu in inventory.gpus] == [
        (gpu.card.model, gpu.card.compute_capability, gpu.card.memory_mib) for gpu in spec.gpus
    ]
    assert "Unknown" not in {gpu.brand for gpu in inventory.gpus}
    assert inventory.missing == ()
    assert {file.kind for file in inventory.files} >= {LIBRARY, BINARY, FIRMWARE}
    recheck(inventory, inventory.gpus, [device for gpu in inventory.gpus for device in gpu.mig_devices])


def test_mig_devices_have_their_profiles_and_their_capabilities(tmp_path: Path) -> None:
    _, inventory = discovered(dgx(), tmp_path)
    assert [[device.profile for device in gpu.mig_devices] for gpu in inventory.gpus[:3]] == [
        list(SEVEN),
        list(MIXED),
        [],
    ]
    assert [gpu.mig_enabled for gpu in inventory.gpus] == [True, True] + [False] * 6
    minors = [
        minor for gpu in inventory.gpus for device in gpu.mig_devices for minor in (device.gi_minor, device.ci_minor)
    ]
    assert len(set(minors)) == 20
    for gpu in inventory.gpus:
        for device in gpu.mig_devices:
            access = procfs.ci_access(gpu.minor, device.gi, device.ci)
            assert procfs.read_capability_minor(inventory.roots.proc_root, access) == device.ci_minor


def test_every_file_is_where_the_inventory_says(tmp_path: Path) -> None:
    made, inventory = discovered(dgx(), tmp_path)
    for file in inventory.files:
        assert os.path.realpath(made.directory + file.path) == made.directory + file.path


def test_a_mig_layout_that_changes_makes_the_inventory_stale(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    made = create(dgx(), tmp_path / "node")
    before = current(made.config, run_dir).inventory
    assert cache.load(made.config, run_dir) is not None
    create(spec_from_profile("dgx-a100", mig={0: MIXED}), tmp_path / "node")
    assert cache.load(made.config, run_dir) is None
    with pytest.raises(StaleInventory):
        recheck(before, (), before.gpus[1].mig_devices)
    after = current(made.config, run_dir).inventory
    assert [device.profile for device in after.gpus[0].mig_devices] == list(MIXED)


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("version_mismatch", "driver/library version mismatch"),
        ("no_permission", "nvidiactl"),
        ("driver_not_loaded", "nvidia-modprobe"),
        ("unknown", "code 999"),
    ],
)
def test_a_failing_nvml_has_its_own_words(tmp_path: Path, init: str, words: str) -> None:
    with pytest.raises(DriverError, match=words):
        discovered(replace(dgx(), nvml=NvmlBehaviour(init=init)), tmp_path)


def test_libraries_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"550\.163\.01 \(read in .*560\.28\.03 \("):
        discovered(replace(dgx(), libraries="560.28.03"), tmp_path)


def test_missing_parts_are_told(tmp_path: Path) -> None:
    missing = ("usr/lib/*/libnvidia-encode.so*", "usr/bin/nvidia-smi")
    node = () if os.geteuid() else ("dev/nvidia-uvm",)  # where nodes are a table, there is no file to leave out
    spec = replace(dgx(), missing=missing + node)
    made, inventory = discovered(spec, tmp_path)
    told = "\n".join(inventory.missing)
    assert f"capability video is incomplete: no libnvidia-encode.so.{spec.driver}" in told
    assert "capability utility is incomplete: no nvidia-smi" in told
    if node and not made.why_table:
        assert f"mknod -m 666 {made.directory}/dev/nvidia-uvm c {inventory.majors['nvidia-uvm']} 0" in told
