"""What the devices of a CDI spec bring: together with what all bring, just what the hook's plan has."""

from __future__ import annotations

import itertools

import pytest
from test_plan import NODE, A, B, C, D
from test_plan_extras import FULL, IMEX

from nvct.cdi.devices import EXTRAS, GPU, INDEX, MODES, NAMINGS, TYPE_INDEX, UUID, Devices, devices_of
from nvct.errors import ChoiceError, DriverError, RequestError
from nvct.model import WSL, Ask, ContainerRoot, DeviceNode, Edits, MigDevice, Request
from nvct.plan import plan
from nvct.plan.remainder import complete
from nvct.record import replace
from nvct.settings import Settings

DRM = (DeviceNode("/dev/dri/card1", 226, 1), DeviceNode("/dev/dri/renderD129", 226, 129))
GRAPHIC = replace(FULL, gpus=(*FULL.gpus[:2], replace(FULL.gpus[2], drm_nodes=DRM), FULL.gpus[3]))
ALL_CAPABILITIES = Ask("test", ("all",))


def made(
    mode: str = GPU, node: object = FULL, *tokens: str, namings: tuple[str, ...] = (INDEX,), **settings: object
) -> Devices:
    return devices_of(mode, node, Settings(**settings), namings, tokens or ("all",))  # type: ignore[arg-type]


def by_name(devices: Devices) -> dict[str, Edits]:
    return {name: device.edits for device in devices.devices for name in device.names}


def together(devices: Devices, *names: str) -> Edits:
    """What an engine and the hook make of a spec for a container with these devices."""
    chosen = [by_name(devices)[name] for name in names]
    nodes = {edit.path: edit for part in (devices.common, *chosen) for edit in part.devices}
    mounts = {edit.target: edit for part in (devices.common, *chosen) for edit in part.mounts}
    assert devices.remainder
    rest = complete(devices.remainder, ContainerRoot(), nodes)
    return replace(rest, devices=tuple(nodes.values()), mounts=tuple(mounts.values()), env=devices.common.env)


def facts(edits: Edits) -> dict[str, object]:
    """All that edits do, without the reasons, which name the request."""
    assert edits.proc
    return {
        "devices": {(edit.path, edit.source, edit.major, edit.minor) for edit in edits.devices},
        "mounts": {(edit.target, edit.source, edit.options) for edit in edits.mounts},
        "links": {(edit.path, edit.target) for edit in edits.links},
        "cache": {(edit.name, edit.path, edit.bits) for edit in edits.loader_cache},
        "files": {(edit.path, edit.content, edit.mode) for edit in edits.files},
        "proc": (edits.proc.source, edits.proc.files, set(edits.proc.gpus), set(edits.proc.capabilities)),
        "stale": set(edits.stale),
        "env": edits.env,
    }


NAMES = ("0", "0:0", "0:1", "0:2", "1", "2", "3", "all", "none")


@pytest.mark.parametrize("names", [*itertools.combinations(NAMES, 1), *itertools.combinations(NAMES[:-2], 2)])
def test_a_container_with_devices_gets_what_the_plan_has(names: tuple[str, ...]) -> None:
    planned = plan(GRAPHIC, Request(Ask("test", names), capabilities=ALL_CAPABILITIES), Settings())
    assert facts(together(made(GPU, GRAPHIC), *names)) == facts(planned)


def test_every_device_by_all_its_names() -> None:
    devices = made(namings=NAMINGS).devices
    assert [device.names for device in devices] == [
        ("0", A, "gpu0"),
        ("0:0", "MIG-11111111-0000-5000-8000-000000000000", "mig0:0"),
        ("0:1", "MIG-22222222-0000-5000-8000-000000000000", "mig0:1"),
        ("0:2", "MIG-33333333-0000-5000-8000-000000000000", "mig0:2"),
        ("1", B, "gpu1"),
        ("2", C, "gpu2"),
        ("3", D, "gpu3"),
        ("all",),
        ("none",),
    ]


def test_the_uuids_of_old_drivers_are_no_names_of_cdi() -> None:
    old = MigDevice(0, f"MIG-{A}/2/0", "3g.20gb", 2, 0, 20096, 21, 22)
    node = replace(FULL, gpus=(replace(FULL.gpus[0], mig_devices=(old,)),))
    assert [device.names for device in made(GPU, node, namings=(UUID, TYPE_INDEX)).devices][1] == ("mig0:0",)


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (("2",), ["2", "all", "none"]),
        (("0:1",), ["0:1", "all", "none"]),
        (("0", "0:1"), ["0", "0:1", "all", "none"]),
        ((D, "0:2"), ["0:2", "3", "all", "none"]),
    ],
)
def test_only_the_devices_that_are_chosen(tokens: tuple[str, ...], names: list[str]) -> None:
    devices = made(GPU, FULL, *tokens)
    assert list(by_name(devices)) == names
    own = {edit.path for name in names[:-2] for edit in by_name(devices)[name].devices}
    assert {edit.path for name in names[-2:-1] for edit in by_name(devices)[name].devices} == own


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RequestError, match="`9` in the CDI device"):
        made(GPU, FULL, "9")


def test_the_words_of_the_variable_choose_too() -> None:
    assert list(by_name(made(GPU, FULL, "none"))) == ["none"]
    assert list(by_name(made(GPU, FULL, "none", "2"))) == ["none"]  # the first of the words outweighs the rest
    assert list(by_name(made(GPU, FULL, "2", "all"))) == list(by_name(made(GPU, FULL, "all")))
    with pytest.raises(ChoiceError, match="`2`, `void`: `void` asks for nothing"):
        made(GPU, FULL, "2", "void")


def test_a_node_without_a_gpu_has_the_driver() -> None:
    devices = made(GPU, replace(FULL, gpus=()))
    assert list(by_name(devices)) == ["none"]
    assert {edit.path for edit in devices.common.devices} >= {"/dev/nvidiactl", "/dev/nvidia-uvm"}


def test_settings_about_variables_do_not_concern_an_engines_devices() -> None:
    assert list(by_name(made(unprivileged_env="refuse")))[:2] == ["0", "0:0"]


def test_the_administrators_limits_hold() -> None:
    targets = {edit.target for edit in made(supported_capabilities=("utility",)).common.mounts}
    assert not [target for target in targets if "libcuda" in target]
    assert [target for target in targets if "libnvidia-ml" in target]


def test_everything_for_managing_the_node() -> None:
    devices = made("management")
    assert list(by_name(devices)) == ["all"]
    paths = {edit.path for part in (devices.common, by_name(devices)["all"]) for edit in part.devices}
    assert paths == {
        *("/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
        *(f"/dev/nvidia{gpu.minor}" for gpu in FULL.gpus),
        *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (1, 2, 21, 22, 23, 84, 85)),
        *(f"{IMEX}/channel0", f"{IMEX}/channel7"),
    }
    assert devices.remainder
    assert complete(devices.remainder, ContainerRoot(), paths).proc is None


def test_a_driver_without_mig_can_be_managed_as_well() -> None:
    node = replace(FULL, gpus=FULL.gpus[2:], mig_minors={}, majors={"nvidia": 195, "nvidia-uvm": 507}, extra_nodes={})
    assert {edit.path for edit in by_name(made("management", node))["all"].devices} == {"/dev/nvidia5", "/dev/nvidia1"}


def test_imex_channels() -> None:
    found = {name: [edit.path for edit in edits.devices] for name, edits in by_name(made("imex")).items()}
    assert found == {
        "0": [f"{IMEX}/channel0"],
        "7": [f"{IMEX}/channel7"],
        "all": [f"{IMEX}/channel0", f"{IMEX}/channel7"],
    }


def test_imex_channels_that_the_settings_give_to_nobody() -> None:
    with pytest.raises(RequestError, match="imex_channels"):
        made("imex", imex_channels=False)


@pytest.mark.parametrize("mode", EXTRAS)
def test_nodes_of_another_kind_alone(mode: str) -> None:
    devices = made(mode)
    assert devices.common == Edits()
    (edits,) = by_name(devices).values()
    assert [edit.path for edit in edits.devices] == [node.path for node in FULL.extra_nodes[mode]]
    assert [edit.target for edit in edits.mounts] == (["/etc/cufile.json", "/run/udev"] if mode == "gds" else [])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in (GPU, "management")])
def test_a_node_that_has_nothing_of_the_kind(mode: str) -> None:
    with pytest.raises(DriverError, match="this node has no"):
        made(mode, NODE)


@pytest.mark.parametrize("mode", MODES[1:])
def test_devices_are_chosen_among_gpus_only(mode: str) -> None:
    with pytest.raises(ChoiceError, match=f"`2`: devices can be chosen in mode {GPU} only"):
        made(mode, FULL, "2")


def test_where_no_gpu_can_be_told_from_another() -> None:
    node = replace(NODE, kind=WSL, nodes=(DeviceNode("/dev/dxg", 10, 127),), files=())
    assert list(by_name(made(GPU, node))) == ["all", "none"]
