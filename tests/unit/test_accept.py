"""What of a request counts, by the settings of the node; and whether an image's conditions hold there."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct.errors import NvctError, RequestError
from nvct.model import Ask, ContainerRoot, DeviceNode, Edits, Gpu, Inventory, MigDevice, Request, Roots
from nvct.plan import plan, resolve
from nvct.plan.accept import Accepted, accept
from nvct.record import replace
from nvct.request import MOUNT_LIST, asks_for_nothing, request_from_env
from nvct.settings import CAPABILITIES, Settings

MIG = MigDevice(0, "MIG-33333333-0000-5000-8000-000000000000", "1g.5gb", 9, 0, 4864, 84, 85)
GPUS = (
    Gpu(
        0,
        "GPU-aaaaaaaa-0000-4000-8000-000000000000",
        1,
        "00000000:47:00.0",
        "A100",
        "NVIDIA",
        "8.0",
        40536,
        True,
        (MIG,),
    ),
    Gpu(1, "GPU-bbbbbbbb-0000-4000-8000-000000000001", 0, "00000000:0F:00.0", "T4", "Tesla", "7.5", 15360),
)
NODE = Inventory(
    driver_version="550.54.15",
    cuda_version="12.4",
    architecture="x86_64",
    roots=Roots(),
    majors={"nvidia": 195, "nvidia-uvm": 507, "nvidia-caps": 237, "nvidia-caps-imex-channels": 238},
    gpus=GPUS,
    nodes=(
        DeviceNode("/dev/nvidiactl", 195, 255),
        DeviceNode("/dev/nvidia-modeset", 195, 254),
        DeviceNode("/dev/nvidia-uvm", 507, 0),
        DeviceNode("/dev/nvidia-uvm-tools", 507, 1),
    ),
    mig_minors={"config": 1, "monitor": 2},
)

ENV = "env NVIDIA_VISIBLE_DEVICES"
LIST = f"the mounts below {MOUNT_LIST}"
LISTS = {"accept_mount_lists": True}
IGNORE = {"unprivileged_env": "ignore"}
REFUSE = {"unprivileged_env": "refuse"}
SWARM = {"swarm_resource": ("DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_XGPU")}


def mounts_of(names: Iterable[str]) -> list[object]:
    return [{"source": "/dev/null", "destination": f"{MOUNT_LIST}/{name}"} for name in names]


def request(mounts: tuple[str, ...] = (), privileged: bool = False, **env: str) -> Request:
    return request_from_env(env, ContainerRoot(), privileged, mounts_of(mounts))


def visible(value: str, mounts: tuple[str, ...] = (), privileged: bool = False, **env: str) -> Request:
    return request(mounts, privileged, NVIDIA_VISIBLE_DEVICES=value, **env)


def accepted(asked: Request, **settings: object) -> Accepted:
    return accept(asked, Settings(**settings))


def refusal(asked: Request, **settings: object) -> str:
    with pytest.raises(RequestError) as refused:
        plan(NODE, asked, Settings(**settings))
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Which place counts


@pytest.mark.parametrize(
    ("asked", "settings", "devices"),
    [
        # The environment, and the words in it.
        (request(), {}, None),
        (visible(""), {}, None),
        (visible("0,void"), {}, None),
        (visible("none"), {}, Ask(ENV, ())),
        (visible("all"), {}, Ask(ENV, ("all",))),
        (visible("0,1"), {}, Ask(ENV, ("0", "1"))),
        (visible("0,all"), {}, Ask(ENV, ("all",))),
        # Mount lists.
        (visible("all", ("0",)), LISTS, Ask(LIST, ("0",))),
        (visible("all", ("0",)), {}, Ask(ENV, ("all",))),
        (visible("void", ("1", "0")), LISTS, Ask(LIST, ("1", "0"))),
        (request(("0",)), LISTS, Ask(LIST, ("0",))),
        (request(("0",)), {}, None),
        (request(("cdi/nvidia.com/gpu/0",)), LISTS, Ask(LIST, ("nvidia.com/gpu=0",))),
        (request(("0",)), {**LISTS, **IGNORE}, Ask(LIST, ("0",))),
        (request(("0",)), {**LISTS, **REFUSE}, Ask(LIST, ("0",))),
        (request(("imex/0",)), LISTS, None),
        (visible("0", ("imex/0",)), LISTS, Ask(ENV, ("0",))),
        # The marker of a mount list.
        (visible(MOUNT_LIST, ("GPU-aaaaaaaa",)), LISTS, Ask(LIST, ("GPU-aaaaaaaa",))),
        # Docker swarm.
        (visible("all", DOCKER_RESOURCE_GPU="GPU-a"), SWARM, Ask("env DOCKER_RESOURCE_GPU", ("GPU-a",))),
        (visible("all", DOCKER_RESOURCE_GPU="GPU-a"), {}, Ask(ENV, ("all",))),
        (visible("all", DOCKER_RESOURCE_GPU=""), SWARM, None),
        (request(DOCKER_RESOURCE_GPU="0"), SWARM, Ask("env DOCKER_RESOURCE_GPU", ("0",))),
        (request(DOCKER_RESOURCE_GPU="0"), {}, None),
        (
            request(DOCKER_RESOURCE_XGPU="1,2", DOCKER_RESOURCE_GPU="2,0"),
            SWARM,
            Ask("env DOCKER_RESOURCE_GPU and env DOCKER_RESOURCE_XGPU", ("2", "0", "1", "2")),
        ),
        (visible("0", ("1",), DOCKER_RESOURCE_GPU="0"), {**LISTS, **SWARM}, Ask(LIST, ("1",))),
        # Whoever may not ask by its environment.
        (visible("all"), IGNORE, None),
        (visible("none"), IGNORE, None),
        (request(CUDA_VERSION="9.0"), IGNORE, None),
        (request(DOCKER_RESOURCE_GPU="0"), {**IGNORE, **SWARM}, None),
        (visible("void"), REFUSE, None),
        (request(), REFUSE, None),
        (visible("all", privileged=True), IGNORE, Ask(ENV, ("all",))),
        (visible("all", privileged=True), REFUSE, Ask(ENV, ("all",))),
        (visible("all", ("0",)), {**LISTS, **REFUSE}, Ask(LIST, ("0",))),
    ],
)
def test_the_place_that_counts(asked: Request, settings: dict[str, object], devices: Ask | None) -> None:
    assert accepted(asked, **settings).devices == devices
    if devices is not None:
        assert not asks_for_nothing(asked)


def test_an_old_image_asks_for_everything() -> None:
    devices = accepted(request(CUDA_VERSION="9.0.176")).devices
    assert devices is not None
    assert devices.tokens == ("all",)
    assert devices.source.startswith("env CUDA_VERSION")


@pytest.mark.parametrize(
    ("asked", "settings", "parts"),
    [
        (
            visible("all"),
            IGNORE,
            ["`all`", "(unprivileged_env)", "CAP_SYS_ADMIN", "an ENV of the image", "none of them"],
        ),
        (request(("0", "1")), {}, [LIST, "`0`, `1`", "(accept_mount_lists)"]),
        (visible("all", ("0",)), {}, [LIST, "passed over"]),
        (visible("all", DOCKER_RESOURCE_GPU="0"), {}, ["`0`", "swarm_resource: [DOCKER_RESOURCE_GPU]"]),
    ],
)
def test_what_is_set_aside_is_a_warning(asked: Request, settings: dict[str, object], parts: list[str]) -> None:
    (warning,) = accepted(asked, **settings).warnings
    assert all(part in warning for part in parts), warning
    assert warning in plan(NODE, asked, Settings(**settings)).warnings


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (visible("0"), {}),
        (visible("void"), IGNORE),
        (visible("all", DOCKER_RESOURCE_GPU="0"), SWARM),
        (visible("0", DOCKER_RESOURCE_FPGA="0"), {}),
        (visible("0", DOCKER_RESOURCE_GPU=""), {}),
        (visible("0", DOCKER_RESOURCE_GPU="void"), {}),
        (visible(f"{MOUNT_LIST},void"), {}),
        (visible("all", ("0",)), {**LISTS, **IGNORE}),
    ],
)
def test_what_counts_or_asks_for_nothing_is_no_warning(asked: Request, settings: dict[str, object]) -> None:
    assert accepted(asked, **settings).warnings == ()


def test_a_request_that_does_not_count_changes_nothing_even_where_it_is_nonsense() -> None:
    asked = visible("foo", NVIDIA_DRIVER_CAPABILITIES="bar", NVIDIA_REQUIRE_CUDA="baz", NVIDIA_IMEX_CHANNELS="x")
    edits = plan(NODE, asked, Settings(**IGNORE))
    assert edits == Edits(warnings=edits.warnings)
    assert len(edits.warnings) == 1
    assert resolve(NODE, asked, Settings(**IGNORE)) == ((), ())


@pytest.mark.parametrize(
    ("asked", "settings", "parts"),
    [
        (
            visible("all"),
            REFUSE,
            ["`all`", ENV, "(unprivileged_env)", "an ENV of the image", "NVIDIA_VISIBLE_DEVICES=void"],
        ),
        (request(CUDA_VERSION="9.0"), REFUSE, ["env CUDA_VERSION", "(unprivileged_env)"]),
        (visible(MOUNT_LIST, ("0",)), {}, [ENV, "(accept_mount_lists)", "set accept_mount_lists: true"]),
        (visible(f"{MOUNT_LIST}/0"), {}, ["(accept_mount_lists)"]),
        (visible(MOUNT_LIST), LISTS, ["no mount of /dev/null is there", "the device plugin"]),
        (visible("0", ("none",)), LISTS, [f"`none` in {LIST}", "a word of NVIDIA_VISIBLE_DEVICES"]),
        (request(("cdi/x",)), LISTS, [f"`cdi/x` in {LIST}", "cdi/<vendor>/<class>/<name>"]),
        (request(("cdi/v.com/nic/0",)), LISTS, [f"`v.com/nic=0` in {LIST}", "the nvct runtime"]),
        (request(DOCKER_RESOURCE_GPU="GPU-7af7a99b"), SWARM, ["in env DOCKER_RESOURCE_GPU", "no GPU of this node"]),
    ],
)
def test_refusals_say_why_and_what_to_do(asked: Request, settings: dict[str, object], parts: list[str]) -> None:
    message = refusal(asked, **settings)
    assert all(part in message for part in parts), message


# Capabilities of an old image


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, {"nvidia-uvm", "nvidia-modeset"}),
        ({"NVIDIA_DRIVER_CAPABILITIES": ""}, {"nvidia-uvm"}),
        ({"NVIDIA_DRIVER_CAPABILITIES": "utility"}, set()),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=9"}, {"nvidia-uvm"}),
    ],
)
def test_an_old_image_has_all_capabilities_unless_it_names_some(env: dict[str, str], nodes: set[str]) -> None:
    edits = plan(NODE, visible("1", CUDA_VERSION="9.0", **env), Settings())
    paths = {device.path.removeprefix("/dev/") for device in edits.devices}
    assert paths & {"nvidia-uvm", "nvidia-modeset"} == nodes


# MIG control


@pytest.mark.parametrize("name", ["NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"])
def test_mig_control_is_all_or_nothing_and_for_privileged_containers(name: str) -> None:
    field = name.lower().removeprefix("nvidia_").removesuffix("_devices")
    assert getattr(accepted(visible("0", **{name: ""})), field) is None
    assert getattr(accepted(visible("0", privileged=True, **{name: "all"})), field) == Ask(f"env {name}", ("all",))
    assert f"env {name} asks for `all`, which only a container with CAP_SYS_ADMIN" in refusal(
        visible("0", **{name: "all"})
    )
    assert f"`0` in env {name}: expected `all`" in refusal(visible("0", privileged=True, **{name: "0"}))
    for token in ("0:0", MIG.uuid, "nvidia.com/gpu=0:0"):
        message = refusal(visible(f"1,{token}", privileged=True, **{name: "all"}))
        assert f"`all` in env {name}" in message
        assert f"`{token}` asks for one of them" in message
    for tokens in ("all", "0", "nvidia.com/gpu=all"):
        assert plan(NODE, visible(tokens, privileged=True, **{name: "all"}), Settings()).devices


# IMEX channels


@pytest.mark.parametrize(
    ("asked", "settings", "channels"),
    [
        (visible("0"), {}, None),
        (request(CUDA_VERSION="9.0.176"), {}, None),
        (visible("0", NVIDIA_IMEX_CHANNELS=""), {}, None),
        (visible("0", NVIDIA_IMEX_CHANNELS="none"), {}, None),
        (visible("0", NVIDIA_IMEX_CHANNELS="0,void"), {}, None),
        (visible("void", NVIDIA_IMEX_CHANNELS="bogus"), {}, None),
        (visible("0", NVIDIA_IMEX_CHANNELS="2047, 2048,0,0,channel7,007"), {}, ("2047", "2048", "0", "7")),
        (visible("0", NVIDIA_IMEX_CHANNELS="1048575"), {}, ("1048575",)),
        (visible("0", ("imex/3",), NVIDIA_IMEX_CHANNELS="1"), LISTS, ("3",)),
        (visible("0", ("imex/3",), NVIDIA_IMEX_CHANNELS="1"), {}, ("1",)),
        (visible("0", ("0", "imex/3"), NVIDIA_IMEX_CHANNELS="bogus"), {**LISTS, **IGNORE}, ("3",)),
    ],
)
def test_imex_channels(asked: Request, settings: dict[str, object], channels: tuple[str, ...] | None) -> None:
    found = accepted(asked, **settings)
    assert (found.imex_channels.tokens if found.imex_channels else None) == channels
    assert found.warnings == ()


@pytest.mark.parametrize(
    "token", ["bogus", "-1", "1048576", "9" * 5000, "1.0", "channel", "channelx", "٣", "²", "0x1", "../0"]
)
@pytest.mark.parametrize("place", ["env", "mounts"])
def test_what_is_no_imex_channel_is_refused(token: str, place: str) -> None:
    asked = visible("0", NVIDIA_IMEX_CHANNELS=token)
    if place == "mounts":
        asked = replace(visible("0"), imex_mounts=Ask(LIST, (token,)))
    message = refusal(asked, **LISTS)
    assert "expected the number of an IMEX channel, 0 to 1048575" in message
    assert (LIST if place == "mounts" else "in env NVIDIA_IMEX_CHANNELS") in message


@pytest.mark.parametrize(
    ("asked", "settings", "part"),
    [
        (visible("0", NVIDIA_IMEX_CHANNELS="all"), {}, "name the channels by their numbers"),
        (visible("0", NVIDIA_IMEX_CHANNELS="0"), {"imex_channels": False}, "(imex_channels)"),
        (visible("0", ("0", "imex/0")), {**LISTS, "imex_channels": False}, "(imex_channels)"),
        (visible("0", ("0",), NVIDIA_IMEX_CHANNELS="0"), {**LISTS, **IGNORE}, "(unprivileged_env)"),
    ],
)
def test_imex_channels_that_are_not_given_are_a_warning(asked: Request, settings: dict[str, object], part: str) -> None:
    found = accepted(asked, **settings)
    assert found.imex_channels is None
    (warning,) = found.warnings
    assert part in warning


# GDS and its like


def test_extras_are_asked_for_by_one_word() -> None:
    found = accepted(
        visible("0", NVIDIA_GDS="enabled", NVIDIA_MOFED="disabled", NVIDIA_GDRCOPY="", NVIDIA_NVSWITCH="Enabled")
    )
    assert found.extras == {"gds": Ask("env NVIDIA_GDS", ("enabled",))}
    (warning,) = found.warnings
    assert warning == "`Enabled` in env NVIDIA_NVSWITCH asks for nothing: only `enabled` does"


def test_extras_are_devices_by_environment() -> None:
    asked = visible("0", ("0",), NVIDIA_NVSWITCH="enabled")
    found = accepted(asked, **LISTS, **IGNORE)
    assert found.extras == {}
    assert "env NVIDIA_NVSWITCH asks for `enabled`" in found.warnings[0]
    assert "(unprivileged_env)" in refusal(asked, **LISTS, **REFUSE)
    assert accepted(replace(asked, privileged=True), **LISTS, **IGNORE).extras.keys() == {"nvswitch"}


# Requirements


@pytest.mark.parametrize(
    ("devices", "env"),
    [
        ("1", {"NVIDIA_REQUIRE_CUDA": ""}),
        ("1", {"NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}),
        ("1", {"NVIDIA_REQUIRE_CUDA": "cuda>=13 brand=tesla,driver>=550,driver<551"}),
        ("1", {"NVIDIA_REQUIRE_ARCH": "arch=7.5"}),
        ("0:0", {"NVIDIA_REQUIRE_ARCH": "arch=8.0"}),
        ("0,1", {"NVIDIA_REQUIRE_ARCH": "arch>=7.5"}),
        ("none", {"NVIDIA_REQUIRE_ARCH": "arch>=9.0,brand=x"}),
        ("1", {"NVIDIA_REQUIRE_JETPACK": "csv-mounts=all"}),
        ("1", {"NVIDIA_REQUIRE_CUDA": "cuda>=13", "NVIDIA_DISABLE_REQUIRE": "true"}),
        ("1", {"NVIDIA_REQUIRE_CUDA": "nonsense", "NVIDIA_DISABLE_REQUIRE": "1"}),
        ("1", {"CUDA_VERSION": "13.0", "NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}),
        ("1", {"CUDA_VERSION": "foo", "NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}),
        ("1", {"CUDA_VERSION": "12.4.131"}),
        ("1", {"CUDA_VERSION": "v9"}),
        ("1", {"CUDA_VERSION": "9.0.176-1"}),
        ("1", {"CUDA_VERSION": "foo", "NVIDIA_DISABLE_REQUIRE": "1"}),
        ("void", {"NVIDIA_REQUIRE_CUDA": "cuda>=13"}),
    ],
)
def test_requirements_that_hold(devices: str, env: dict[str, str]) -> None:
    assert isinstance(plan(NODE, visible(devices, **env), Settings()), Edits)


def test_a_node_can_disable_requirements() -> None:
    asked = visible("1", CUDA_VERSION="foo", NVIDIA_REQUIRE_FOO="cuda>=13")
    assert plan(NODE, asked, Settings(disable_require=True)).devices
    assert refusal(asked)


@pytest.mark.parametrize(
    ("devices", "env", "parts"),
    [
        (
            "1",
            {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"},
            [
                f"env NVIDIA_REQUIRE_CUDA: GPU 1 ({GPUS[1].uuid}) does not meet `cuda>=13.0` (cuda is 12.4);",
                "update the driver of this node, use an image for an older CUDA, or set NVIDIA_DISABLE_REQUIRE=true",
            ],
        ),
        ("none", {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, ["this node does not meet `cuda>=13.0` (cuda is 12.4)"]),
        ("1", {"NVIDIA_REQUIRE_FOO": "cuda>=13"}, ["env NVIDIA_REQUIRE_FOO: "]),
        ("1", {"NVIDIA_REQUIRE_B": "cuda>=13", "NVIDIA_REQUIRE_A": "arch>=8"}, ["env NVIDIA_REQUIRE_A: "]),
        ("0,1", {"NVIDIA_REQUIRE_ARCH": "arch>=8"}, [f"GPU 1 ({GPUS[1].uuid}) does not meet `arch>=8` (arch is 7.5)"]),
        ("1,0:0", {"NVIDIA_REQUIRE_ARCH": "arch<8"}, [f"GPU 0 ({GPUS[0].uuid})", "arch is 8.0", "ask for another GPU"]),
        ("0:0", {"NVIDIA_REQUIRE_X": "brand=tesla"}, ["`brand=tesla` (brand is NVIDIA)", "ask for another GPU"]),
        ("1", {"NVIDIA_REQUIRE_X": "driver<550"}, ["use an image for this driver (driver is 550.54.15)"]),
        (
            "0:0",
            {"NVIDIA_REQUIRE_CUDA": "cuda>=13 brand=tesla,driver>=1 arch>=9 cuda>14 cuda>15"},
            [
                "does not meet `cuda>=13` (cuda is 12.4), nor `brand=tesla,driver>=1` (brand is NVIDIA), "
                "nor `arch>=9` (arch is 8.0), nor 2 more alternatives; update the driver"
            ],
        ),
        (
            "1",
            {"NVIDIA_REQUIRE_X": "bogus>=1"},
            ["`bogus>=1` in env NVIDIA_REQUIRE_X names no known fact", "mend it, or set"],
        ),
        ("none", {"NVIDIA_REQUIRE_X": "cuda>=x"}, ["`cuda>=x` in env NVIDIA_REQUIRE_X"]),
        ("1", {"CUDA_VERSION": "13.0"}, ["env CUDA_VERSION: ", "`cuda>=13.0`"]),
        ("1", {"CUDA_VERSION": "13"}, ["`cuda>=13.0`"]),
        ("1", {"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_FOO": "cuda<9"}, ["env NVIDIA_REQUIRE_FOO: "]),
        (
            "1",
            {"CUDA_VERSION": "foo"},
            ["`foo` in env CUDA_VERSION: expected a version such as 9.0.176", "set NVIDIA_REQUIRE_CUDA"],
        ),
        ("1", {"CUDA_VERSION": "9.0.1.2"}, ["`9.0.1.2` in env CUDA_VERSION"]),
        ("1", {"CUDA_VERSION": "9."}, ["`9.` in env CUDA_VERSION"]),
        ("1", {"CUDA_VERSION": "٩"}, ["in env CUDA_VERSION"]),
    ],
)
def test_requirements_that_do_not_hold(devices: str, env: dict[str, str], parts: list[str]) -> None:
    message = refusal(visible(devices, **env))
    assert all(part in message for part in parts), message


def test_a_node_whose_cuda_nobody_knows_meets_any_version() -> None:
    unknown = replace(NODE, cuda_version="")
    assert plan(unknown, visible("1", NVIDIA_REQUIRE_CUDA="cuda>=99"), Settings()).devices


# Everything at once

VALUES = st.sampled_from(
    [
        "",
        "all",
        "none",
        "void",
        "0",
        "1",
        "0:0",
        "0,1",
        "enabled",
        "true",
        "compute",
        "cuda>=12",
        "cuda>=13",
        "9.0",
        MOUNT_LIST,
        f"void,{MOUNT_LIST}",
    ]
) | st.text(max_size=12)
NAMES = st.sampled_from(
    """NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES CUDA_VERSION NVIDIA_REQUIRE_CUDA NVIDIA_REQUIRE_X
    NVIDIA_DISABLE_REQUIRE NVIDIA_MIG_CONFIG_DEVICES NVIDIA_MIG_MONITOR_DEVICES NVIDIA_IMEX_CHANNELS NVIDIA_GDS
    NVIDIA_MOFED NVIDIA_GDRCOPY NVIDIA_NVSWITCH DOCKER_RESOURCE_GPU DOCKER_RESOURCE_XGPU""".split()  # noqa: SIM905
)
MOUNTS = st.lists(
    st.sampled_from(["0", "1", "all", "imex/0", "imex/x", "cdi/nvidia.com/gpu/0", "cdi/x", "x"]), max_size=3
)
SETTINGS = st.builds(
    Settings,
    unprivileged_env=st.sampled_from(["accept", "ignore", "refuse"]),
    accept_mount_lists=st.booleans(),
    swarm_resource=st.sampled_from([(), SWARM["swarm_resource"]]),
    disable_require=st.booleans(),
    imex_channels=st.booleans(),
    supported_capabilities=st.sampled_from([CAPABILITIES, ("utility",)]),
)


PREFIXES = st.sampled_from(["NVIDIA_REQUIRE_", "DOCKER_RESOURCE_GPU"])
STRANGE_NAMES = st.builds(str.__add__, PREFIXES, st.text(max_size=6))


@given(st.dictionaries(NAMES | STRANGE_NAMES, VALUES, max_size=6), MOUNTS, st.booleans(), SETTINGS)
def test_any_request_is_planned_or_refused(
    env: dict[str, str], mounts: list[str], privileged: bool, settings: Settings
) -> None:
    asked = request_from_env(env, ContainerRoot(), privileged, mounts_of(mounts))
    try:
        edits = plan(NODE, asked, settings)
    except NvctError as error:
        assert str(error)
        assert str(error).isprintable()
        return
    counts = accept(asked, settings)
    assert bool(edits.devices) is (counts.devices is not None)
    assert set(counts.warnings) <= set(edits.warnings)
    assert all(warning.isprintable() for warning in counts.warnings)
    if asks_for_nothing(asked):
        assert edits == Edits()
    gpus, mig = resolve(NODE, asked, settings)
    assert len(gpus) == len(set(gpus))
    assert len(mig) == len(set(mig))
