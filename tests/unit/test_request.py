"""What a container asks for, read from its spec or its environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct.errors import RequestError
from nvct.model import Ask, ContainerRoot, Request
from nvct.request import asks_for_nothing, meant, request_from_env, request_from_spec

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
    request = request_from_env({"NVIDIA_VISIBLE_DEVICES": value})
    assert request.devices is not None
    assert meant(request.devices.tokens) == devices
    assert asks_for_nothing(request) is (devices is None)


def test_an_empty_environment_asks_for_nothing() -> None:
    assert request_from_env([]) == Request()
    assert asks_for_nothing(Request())


@pytest.mark.parametrize(
    ("value", "capabilities"),
    [("compute, utility", ("compute", "utility")), ("", ()), (",", ()), ("all", ("all",)), ("x,,x", ("x", "x"))],
)
def test_capability_tokens(value: str, capabilities: tuple[str, ...]) -> None:
    request = request_from_env({"NVIDIA_DRIVER_CAPABILITIES": value})
    assert request.capabilities == Ask("env NVIDIA_DRIVER_CAPABILITIES", capabilities)


def test_unset_capabilities_are_told_from_empty_ones() -> None:
    assert request_from_env({}).capabilities is None


def test_the_last_entry_of_a_name_counts() -> None:
    request = request_from_env(["NVIDIA_VISIBLE_DEVICES=all", "A=1", "NVIDIA_VISIBLE_DEVICES=2"])
    assert request.devices == Ask("env NVIDIA_VISIBLE_DEVICES", ("2",))


def test_a_value_may_hold_equals_signs() -> None:
    request = request_from_env(["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"])
    assert request.devices == Ask("env NVIDIA_VISIBLE_DEVICES", ("nvidia.com/gpu=0",))


@pytest.mark.parametrize("entry", ["my-secret", "", "NVIDIA_VISIBLE_DEVICES"])
def test_an_entry_without_an_equals_sign_sets_nothing(entry: str) -> None:
    assert request_from_env(["A=1", entry]) == Request()
    request = request_from_env(["NVIDIA_VISIBLE_DEVICES=2", entry])
    assert request.devices == Ask("env NVIDIA_VISIBLE_DEVICES", ("2",))


def test_an_entry_that_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="entry 1 .* is an object; expected NAME=VALUE"):
        request_from_env(["A=1", {"my": "secret"}])


def test_a_spec_carries_environment_privilege_and_root() -> None:
    root = ContainerRoot(debian=False, lib32=True)
    request = request_from_spec(spec(("NVIDIA_VISIBLE_DEVICES=0:1",)), root)
    assert request == Request(devices=Ask("env NVIDIA_VISIBLE_DEVICES", ("0:1",)), container=root)


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
        (None, "holds null"),
        ({"ociVersion": "1.0.0", "process": [1], "root": {"path": "/"}}, "`process` in config.json is a list"),
        (spec(env="A=1"), "`process.env` in config.json is a string"),
        (spec(env=({"A": 1},)), "entry 0"),
        ({**spec(), "mounts": {}}, "`mounts` in config.json is an object"),
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
        "mounts": json_values | st.lists(st.dictionaries(st.sampled_from(["source", "destination"]), json_values)),
        "process": json_values
        | st.fixed_dictionaries({}, optional={"env": json_values | st.lists(st.text()), "capabilities": json_values}),
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
    request = request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(tokens)})
    plain = tuple(token.strip() for token in tokens if token.strip())
    assert request.devices == Ask("env NVIDIA_VISIBLE_DEVICES", plain)
    again = request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(request.devices.tokens)})
    assert again == request
    if "all" in plain or "none" in plain:
        first = next(token for token in plain if token in ("all", "none"))
        assert meant(plain) == (("all",) if first == "all" else ())
    else:
        assert meant(plain) == (plain or None)


@given(st.lists(st.sampled_from(GIVEN)), st.integers(min_value=0))
def test_void_anywhere_means_nothing(tokens: list[str], place: int) -> None:
    tokens.insert(place % (len(tokens) + 1), "void")
    assert asks_for_nothing(request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(tokens)}))


# Lists of mounts

LIST = "/var/run/nvidia-container-devices"


def listing(*targets: str, source: str = "/dev/null") -> Request:
    mounts = [{"source": source, "destination": target} for target in targets]
    return request_from_spec({**spec(), "mounts": mounts}, ContainerRoot())


@pytest.mark.parametrize(
    ("target", "device"),
    [
        (f"{LIST}/0", "0"),
        (f"{LIST}/all", "all"),
        (f"{LIST}//GPU-5f3a9c01/", "GPU-5f3a9c01"),
        (f"{LIST}/./x/../0:1", "0:1"),
        (f"/{LIST}/0", "0"),
        (f"{LIST}/MIG-GPU-5f3a9c01/7/0", "MIG-GPU-5f3a9c01/7/0"),
        (f"{LIST}/cdi/nvidia.com/gpu/0", "nvidia.com/gpu=0"),
        (f"{LIST}/cdi/vendor.com/nic/a/b", "vendor.com/nic=a/b"),
        (f"{LIST}/cdi/nvidia.com/gpu=0:1", "nvidia.com/gpu=0:1"),
        (f"{LIST}/cdi/nvidia.com/gpu", "cdi/nvidia.com/gpu"),
        (f"{LIST}/cdi", "cdi"),
        (LIST, None),
        (f"{LIST}/", None),
        (f"{LIST}X/0", None),
        (f"{LIST}/../0", None),
        ("/run/nvidia-container-devices/0", None),
        ("/dev/null", None),
    ],
)
def test_a_mount_of_dev_null_below_the_list_names_a_device(target: str, device: str | None) -> None:
    request = listing(target)
    assert request.mount_list == (Ask(f"the mounts below {LIST}", (device,)) if device else None)
    assert request.imex_mounts is None
    assert asks_for_nothing(request) is (device is None)


@pytest.mark.parametrize("source", ["/dev//null", "/dev/./null/", "//dev/null"])
def test_a_source_that_is_dev_null_counts_however_it_is_written(source: str) -> None:
    assert listing(f"{LIST}/0", source=source).mount_list == Ask(f"the mounts below {LIST}", ("0",))


@pytest.mark.parametrize("source", ["/dev/zero", "dev/null", "null", "", "/dev/null/x"])
def test_mounts_of_other_sources_do_not_count(source: str) -> None:
    assert listing(f"{LIST}/0", source=source).mount_list is None


def test_a_list_has_each_device_once_in_its_order_and_channels_apart() -> None:
    request = listing(*(f"{LIST}/{name}" for name in ("2", "imex/1", "0", "2", "imex/channel0", "imex/1")))
    assert request.mount_list == Ask(f"the mounts below {LIST}", ("2", "0"))
    assert request.imex_mounts == Ask(f"the mounts below {LIST}", ("1", "channel0"))


@pytest.mark.parametrize("mount", [None, 1, "x", {}, {"source": 1, "destination": LIST}, {"source": "/dev/null"}])
def test_what_is_no_mount_of_a_list_is_passed_over(mount: object) -> None:
    assert request_from_spec({**spec(), "mounts": [mount]}, ContainerRoot()) == Request()


# Other variables


def test_swarm_variables_are_kept_by_name() -> None:
    request = request_from_env({"DOCKER_RESOURCE_GPU": "GPU-a, GPU-b", "DOCKER_RESOURCE_FPGA": "", "DOCKER_X": "1"})
    assert request.swarm == {
        "DOCKER_RESOURCE_GPU": Ask("env DOCKER_RESOURCE_GPU", ("GPU-a", "GPU-b")),
        "DOCKER_RESOURCE_FPGA": Ask("env DOCKER_RESOURCE_FPGA", ()),
    }
    assert not asks_for_nothing(request)
    assert asks_for_nothing(request_from_env({"DOCKER_RESOURCE_FPGA": ""}))


@pytest.mark.parametrize(
    ("env", "legacy", "nothing"),
    [
        ({"CUDA_VERSION": "9.0.176"}, "9.0.176", False),
        ({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_CUDA": ""}, "9.0", False),
        ({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_CUDA": "cuda>=9.0"}, "", True),
        ({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_FOO": "cuda>=9.0"}, "9.0", False),
        ({"CUDA_VERSION": ""}, "", True),
        ({"CUDA_VERSION": "9.0", "NVIDIA_VISIBLE_DEVICES": ""}, "9.0", True),
        ({"CUDA_VERSION": "9.0", "NVIDIA_VISIBLE_DEVICES": "void"}, "9.0", True),
        ({"CUDA_VERSION": "9.0", "NVIDIA_VISIBLE_DEVICES": "none"}, "9.0", False),
    ],
)
def test_an_image_from_before_the_requirements(env: dict[str, str], legacy: str, nothing: bool) -> None:
    request = request_from_env(env)
    assert request.legacy_cuda == legacy
    assert asks_for_nothing(request) is nothing


def test_requirements_stand_in_the_order_of_their_names_without_those_of_jetson() -> None:
    names = (
        "NVIDIA_REQUIRE_Z",
        "NVIDIA_REQUIRE_CUDA",
        "NVIDIA_REQUIRE_JETPACK",
        "NVIDIA_REQUIRE_JETPACK_X",
        "NVIDIA_REQUIRE",
    )
    request = request_from_env(dict.fromkeys(names, "cuda>=9, driver>1"))
    assert request.requirements == (
        Ask("env NVIDIA_REQUIRE_CUDA", ("cuda>=9, driver>1",)),
        Ask("env NVIDIA_REQUIRE_Z", ("cuda>=9, driver>1",)),
    )


@pytest.mark.parametrize("value", ["1", "t", "T", "TRUE", "true", "True"])
def test_requirements_can_be_disabled(value: str) -> None:
    assert request_from_env({"NVIDIA_DISABLE_REQUIRE": value}).requirements_disabled


@pytest.mark.parametrize("value", ["", "0", "f", "false", "yes", "tRUE", " 1", "enabled"])
def test_any_other_value_leaves_requirements_enabled(value: str) -> None:
    assert not request_from_env({"NVIDIA_DISABLE_REQUIRE": value}).requirements_disabled


def test_the_rest_stands_as_it_was_written() -> None:
    request = request_from_env(
        {
            "NVIDIA_MIG_CONFIG_DEVICES": "all",
            "NVIDIA_MIG_MONITOR_DEVICES": "",
            "NVIDIA_IMEX_CHANNELS": "0, 7",
            "NVIDIA_GDS": "enabled",
            "NVIDIA_MOFED": "Enabled",
            "NVIDIA_GDRCOPY": "",
            "NVIDIA_NVSWITCH": "1",
        }
    )
    assert request == Request(
        mig_config=Ask("env NVIDIA_MIG_CONFIG_DEVICES", ("all",)),
        mig_monitor=Ask("env NVIDIA_MIG_MONITOR_DEVICES", ()),
        imex_channels=Ask("env NVIDIA_IMEX_CHANNELS", ("0", "7")),
        extras={
            "gds": Ask("env NVIDIA_GDS", ("enabled",)),
            "mofed": Ask("env NVIDIA_MOFED", ("Enabled",)),
            "gdrcopy": Ask("env NVIDIA_GDRCOPY", ()),
            "nvswitch": Ask("env NVIDIA_NVSWITCH", ("1",)),
        },
    )
    assert asks_for_nothing(request)


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA"])
def test_a_variable_that_no_program_could_be_started_with(name: str) -> None:
    assert request_from_env({name: "0" * 131072})
    with pytest.raises(RequestError, match=f"{name} has 131073 characters, expected at most 131072"):
        request_from_env({name: "0" * 131073})
