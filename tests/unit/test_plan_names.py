"""Which devices a runtime has a plan give and which CDI specs, by mode and by place of the request."""

from __future__ import annotations

from typing import Any

import pytest

from nvct.errors import RequestError
from nvct.model import ContainerRoot, Request
from nvct.plan.accept import accept
from nvct.plan.names import Shares, names_foreign, share_out
from nvct.request import asks_for_nothing, request_from_spec
from nvct.settings import Settings

DEVICES = "NVIDIA_VISIBLE_DEVICES"


def request(
    env: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    mounts: tuple[str, ...] = (),
    with_annotations: bool = True,
) -> Request:
    spec: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {"env": [f"{name}={value}" for name, value in (env or {}).items()], "args": ["true"]},
        "root": {"path": "rootfs"},
        "annotations": annotations,
        "mounts": [
            {"source": "/dev/null", "destination": f"/var/run/nvidia-container-devices/{name}"} for name in mounts
        ],
    }
    return request_from_spec(spec, ContainerRoot(), with_annotations)


def tokens(shares: Shares, settings: Settings) -> tuple[str, ...] | None:
    """The devices that are left for a plan."""
    if shares.request is None:
        return None
    devices = accept(shares.request, settings).devices
    return devices.tokens if devices else None


GPU_NAME = "nvidia.com/gpu=1"
NIC = {"cdi.k8s.io/nic": "example.com/nic=a"}
GPU = {"cdi.k8s.io/gpu": GPU_NAME}
MOUNTS = ("2", "cdi/example.com/nic/b")


@pytest.mark.parametrize(
    ("mode", "env", "annotations", "names", "planned"),
    [
        # plain requests are planned, whatever the runtime knows of CDI
        ("auto", {DEVICES: "0:1"}, {}, (), ("0:1",)),
        ("spec", {DEVICES: "0:1"}, {}, (), ("0:1",)),
        ("auto", {DEVICES: "all"}, {}, (), ("all",)),
        ("auto", {DEVICES: "none"}, {}, (), ()),
        # nvidia.com/gpu is the plan's, other kinds are the specs'
        ("auto", {DEVICES: "nvidia.com/gpu=1"}, {}, (), ("nvidia.com/gpu=1",)),
        ("auto", {DEVICES: "example.com/nic=a"}, {}, ("example.com/nic=a",), None),
        ("auto", {DEVICES: "example.com/nic=a,0,nvidia.com/gpu=1"}, {}, ("example.com/nic=a",), ("0", GPU_NAME)),
        ("spec", {DEVICES: "example.com/nic=a"}, {}, (), ("example.com/nic=a",)),
        # annotations come first, and only in the modes that know CDI names
        ("auto", {DEVICES: "0"}, GPU, (), ("nvidia.com/gpu=1",)),
        ("auto", {DEVICES: "0"}, NIC, ("example.com/nic=a",), None),
        ("auto", {}, {**NIC, **GPU}, ("example.com/nic=a",), ("nvidia.com/gpu=1",)),
        ("spec", {DEVICES: "0"}, GPU, (), ("0",)),
        ("hook", {DEVICES: "0"}, GPU, (), ("0",)),
        # in the mode cdi everything is a name
        ("cdi", {DEVICES: "0:1"}, {}, ("nvidia.com/gpu=0:1",), None),
        ("cdi", {DEVICES: "0,0,GPU-1"}, {}, ("nvidia.com/gpu=0", "nvidia.com/gpu=GPU-1"), None),
        ("cdi", {DEVICES: "all"}, {}, ("nvidia.com/gpu=all",), None),
        ("cdi", {DEVICES: "none"}, {}, ("nvidia.com/gpu=none",), None),
        ("cdi", {DEVICES: "2"}, {**NIC, **GPU}, ("nvidia.com/gpu=1", "example.com/nic=a"), None),
        ("cdi", {DEVICES: "void"}, {}, (), None),
    ],
)  # fmt: skip
def test_modes(
    mode: str, env: dict[str, str], annotations: dict[str, str], names: tuple[str, ...], planned: tuple[str, ...] | None
) -> None:
    settings = Settings(runtime_mode=mode)
    shares = share_out(request(env, annotations), settings)
    assert shares.names == names
    assert tokens(shares, settings) == planned


def test_annotations_outweigh_mounts_and_mounts_variables() -> None:
    settings = Settings(accept_mount_lists=True)
    everything = request({DEVICES: "0"}, {"cdi.k8s.io/gpu": "nvidia.com/gpu=1"}, ("2",))
    assert tokens(share_out(everything, settings), settings) == ("nvidia.com/gpu=1",)
    assert tokens(share_out(request({DEVICES: "0"}, None, ("2",)), settings), settings) == ("2",)
    shares = share_out(request({DEVICES: "0"}, None, MOUNTS), settings)
    assert (shares.names, tokens(shares, settings)) == (("example.com/nic=b",), ("2",))


def test_a_variable_that_annotations_outweigh_is_told_of() -> None:
    (warning,) = accept(request({DEVICES: "0"}, GPU), Settings()).warnings
    assert warning == f"env {DEVICES} asks for `0`, and was passed over: annotation cdi.k8s.io/gpu names devices"
    assert accept(request({DEVICES: "void"}, GPU), Settings()).warnings == ()


def test_annotations_need_no_privilege_where_variables_do() -> None:
    settings = Settings(unprivileged_env="ignore")
    assert tokens(share_out(request({DEVICES: "0"}), settings), settings) is None
    assert tokens(share_out(request({DEVICES: "0"}, GPU), settings), settings) == ("nvidia.com/gpu=1",)
    refusing = Settings(unprivileged_env="refuse")
    with pytest.raises(RequestError, match="unprivileged_env"):
        share_out(request({DEVICES: "example.com/nic=a"}), refusing)


def test_prefixes_of_annotations() -> None:
    other = {"nvidia.cdi.k8s.io/gpu": "nvidia.com/gpu=1", "cdi.k8s.io/gpu": "nvidia.com/gpu=2"}
    for prefixes, expected in (
        (("cdi.k8s.io/",), ("nvidia.com/gpu=2",)),
        (("nvidia.cdi.k8s.io/",), ("nvidia.com/gpu=1",)),
        (("cdi.k8s.io/", "nvidia.cdi.k8s.io/"), ("nvidia.com/gpu=2", "nvidia.com/gpu=1")),
        ((), ("0",)),
    ):
        settings = Settings(cdi_annotation_prefixes=prefixes)
        assert tokens(share_out(request({DEVICES: "0"}, other), settings), settings) == expected


def test_annotations_in_the_order_of_their_keys() -> None:
    several = {"cdi.k8s.io/b": "nvidia.com/gpu=2, nvidia.com/gpu=3,", "cdi.k8s.io/a": "nvidia.com/gpu=1"}
    assert list(request({}, several).annotations) == ["cdi.k8s.io/a", "cdi.k8s.io/b"]
    assert tokens(share_out(request({}, several), Settings()), Settings()) == (
        "nvidia.com/gpu=1",
        "nvidia.com/gpu=2",
        "nvidia.com/gpu=3",
    )


@pytest.mark.parametrize(
    ("annotations", "nothing"),
    [
        (GPU, False),
        ({"nvidia.cdi.k8s.io/x": "a"}, False),
        ({"cdi.k8s.io/x": " , "}, True),
        ({"io.kubernetes.cri": "nvidia.com/gpu=0"}, True),
        ({"cdi.k8s.io/x": 7}, True),
        (None, True),
    ],
)
def test_annotations_that_ask_for_something(annotations: Any, nothing: bool) -> None:
    assert asks_for_nothing(request({}, annotations)) == nothing
    assert asks_for_nothing(request({}, annotations, with_annotations=False))


def test_annotations_of_another_shape_are_refused() -> None:
    with pytest.raises(RequestError, match="`annotations` in config.json is a list; expected an object"):
        request({}, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "annotations", "foreign"),
    [
        ({DEVICES: "0,nvidia.com/gpu=1,GPU-348f192c"}, {}, False),
        ({DEVICES: "0,example.com/nic=a"}, {}, True),
        ({}, NIC, True),
        ({}, GPU, False),
        ({"DOCKER_RESOURCE_GPU": "example.com/nic=a"}, {}, True),
    ],
)
def test_whether_any_name_is_another_makers(env: dict[str, str], annotations: dict[str, str], foreign: bool) -> None:
    assert names_foreign(request(env, annotations)) == foreign
