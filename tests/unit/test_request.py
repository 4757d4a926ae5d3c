"""What a container asks for, read from its spec or its environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct.errors import RequestError
from nvct.model import ContainerRoot, Request
from nvct.request import request_from_env, request_from_spec

GIVEN = ["0", "1", "all", "none", "GPU-5f3a9c01", "0:1", "foo", " 2 ", "", "nvidia.com/gpu=0"]


def spec(env: object = (), **process: object) -> dict:
    return {
        "ociVersion": "1.0.2",
        "process": {"args": ["sh"], "env": list(env) if isinstance(env, tuple) else env, **process},
        "root": {"path": "rootfs"},
    }


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0", ("0",)),
        ("3,0,1", ("3", "0", "1")),
        ("0,,1", ("0", "1")),
        (" 0 ,\t1 ", ("0", "1")),
        ("0,0", ("0", "0")),
        ("", None),
        (",", None),
        ("  ", None),
        ("void", None),
        ("0,void", None),
        ("void,all", None),
        ("none,void", None),
        ("none", ()),
        ("0,none", ()),
        ("none,all", ()),
        ("all", ("all",)),
        ("0,all", ("all",)),
        ("all,none", ("all",)),
        ("All", ("All",)),
        ("NONE", ("NONE",)),
    ],
)
def test_device_tokens(value: str, devices: tuple[str, ...] | None) -> None:
    assert request_from_env({"NVIDIA_VISIBLE_DEVICES": value}).devices == devices


def test_an_empty_environment_asks_for_nothing() -> None:
    assert request_from_env([]) == Request()


@pytest.mark.parametrize(
    ("value", "capabilities"),
    [("compute, utility", ("compute", "utility")), ("", ()), (",", ()), ("all", ("all",)), ("x,,x", ("x", "x"))],
)
def test_capability_tokens(value: str, capabilities: tuple[str, ...]) -> None:
    request = request_from_env({"NVIDIA_DRIVER_CAPABILITIES": value})
    assert request.capabilities == capabilities
    assert request.capabilities_source == "env NVIDIA_DRIVER_CAPABILITIES"


def test_unset_capabilities_are_told_from_empty_ones() -> None:
    assert request_from_env({}).capabilities is None


def test_the_last_entry_of_a_name_counts() -> None:
    request = request_from_env(["NVIDIA_VISIBLE_DEVICES=all", "A=1", "NVIDIA_VISIBLE_DEVICES=2"])
    assert request.devices == ("2",)
    assert request.devices_source == "env NVIDIA_VISIBLE_DEVICES"


def test_a_value_may_hold_equals_signs() -> None:
    assert request_from_env(["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]).devices == ("nvidia.com/gpu=0",)


def test_a_malformed_entry_is_refused_without_its_text() -> None:
    with pytest.raises(RequestError, match="entry 1 .* not NAME=VALUE") as refused:
        request_from_env(["A=1", "my-secret"])
    assert "my-secret" not in str(refused.value)


def test_a_spec_carries_environment_privilege_and_root() -> None:
    root = ContainerRoot(debian=False, lib32=True)
    request = request_from_spec(spec(("NVIDIA_VISIBLE_DEVICES=0:1",)), root)
    assert request == Request(devices=("0:1",), devices_source="env NVIDIA_VISIBLE_DEVICES", container=root)


@pytest.mark.parametrize(
    ("capabilities", "privileged"),
    [
        (None, False),
        ({}, False),
        ({"bounding": None}, False),
        ({"bounding": ["CAP_CHOWN"]}, False),
        ({"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}, True),
        ({"effective": ["CAP_SYS_ADMIN"], "bounding": ["CAP_CHOWN"]}, False),
        (["CAP_SYS_ADMIN"], True),
        (["CAP_CHOWN"], False),
        ("CAP_SYS_ADMIN", False),
    ],
)
def test_privileged_is_cap_sys_admin_in_the_bounding_set(capabilities: object, privileged: bool) -> None:
    assert request_from_spec(spec(capabilities=capabilities), ContainerRoot()).privileged is privileged


@pytest.mark.parametrize("missing", ["ociVersion", "process", "root"])
def test_a_spec_without_its_parts_is_refused(missing: str) -> None:
    broken = {name: value for name, value in spec().items() if name != missing}
    with pytest.raises(RequestError, match=f"no `{missing}`"):
        request_from_spec(broken, ContainerRoot())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "holds a list"),
        (None, "holds a null"),
        ({"ociVersion": "1.0.0", "process": [1], "root": {"path": "/"}}, "`process` in config.json is a list"),
        (spec(env="A=1"), "`process.env` in config.json is a string"),
        (spec(env=({"A": 1},)), "entry 0"),
    ],
)
def test_what_is_no_spec_is_refused(broken: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request_from_spec(broken, ContainerRoot())


def test_a_spec_without_env_asks_for_nothing() -> None:
    assert request_from_spec(spec(env=None), ContainerRoot()).devices is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
spec_like = st.fixed_dictionaries(
    {"ociVersion": json_values, "root": json_values},
    optional={
        "process": json_values
        | st.fixed_dictionaries({}, optional={"env": json_values | st.lists(st.text()), "capabilities": json_values})
    },
)


@given(json_values | spec_like)
def test_any_json_is_a_request_or_refused(value: object) -> None:
    try:
        request = request_from_spec(value, ContainerRoot())
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(request, Request)


@given(st.lists(st.sampled_from(GIVEN)))
def test_order_is_kept_and_reading_twice_is_reading_once(tokens: list[str]) -> None:
    devices = request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(tokens)}).devices
    plain = tuple(token.strip() for token in tokens if token.strip())
    if "all" in plain or "none" in plain:
        first = next(token for token in plain if token in ("all", "none"))
        assert devices == (("all",) if first == "all" else ())
    else:
        assert devices == (plain or None)
    if devices:
        assert request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(devices)}).devices == devices


@given(st.lists(st.sampled_from(GIVEN)), st.integers(min_value=0))
def test_void_anywhere_means_nothing(tokens: list[str], place: int) -> None:
    tokens.insert(place % (len(tokens) + 1), "void")
    assert request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(tokens)}).devices is None


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"])
def test_a_variable_that_no_program_could_be_started_with(name: str) -> None:
    assert request_from_env({name: "0" * 131072})
    with pytest.raises(RequestError, match=f"{name} has 131073 characters, expected at most 131072"):
        request_from_env({name: "0" * 131073})
