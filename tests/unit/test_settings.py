"""The settings file: what is read, and what is refused with which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nvct import settings as module
from nvct.errors import ConfigError, StaleInventory
from nvct.settings import CAPABILITIES, PARTS, Settings, from_json, load, to_json

WHOLE = """\
root: /run/nvidia/driver/
dev_root: /
proc_root: /host/proc
library_search_path: [/opt/nvidia/lib, /opt/nvidia/lib]
device_table: /run/nvct/devices
nvml_timeout_s: 5
supported_capabilities: [utility, compute]
cgroups: false
mask_proc: false
unprivileged_env: ignore
accept_mount_lists: true
swarm_resource: [DOCKER_RESOURCE_GPU, DOCKER_RESOURCE_X, DOCKER_RESOURCE_GPU]
disable_require: true
imex_channels: false
load_kernel_modules: false
modprobe: /opt/sbin/modprobe
device_nodes: replace
sys_root: /host/sys
parts: {firmware: false, mps: true}
cuda_compat: disabled
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("")
    path.chmod(0o644)
    return path


def test_every_setting_can_be_set(file: Path) -> None:
    file.write_text(WHOLE)
    assert load(str(file)) == Settings(
        root="/run/nvidia/driver",
        dev_root="/",
        proc_root="/host/proc",
        library_search_path=("/opt/nvidia/lib",),
        device_table="/run/nvct/devices",
        nvml_timeout_s=5.0,
        supported_capabilities=("compute", "utility"),
        cgroups=False,
        mask_proc=False,
        unprivileged_env="ignore",
        accept_mount_lists=True,
        swarm_resource=("DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_X"),
        disable_require=True,
        imex_channels=False,
        load_kernel_modules=False,
        modprobe="/opt/sbin/modprobe",
        device_nodes="replace",
        sys_root="/host/sys",
        parts={**dict.fromkeys(PARTS, True), "firmware": False},
        cuda_compat="disabled",
    )


@pytest.mark.parametrize("text", ["", "# nothing here\n", "---\n"])
def test_an_empty_file_means_the_defaults(file: Path, text: str) -> None:
    file.write_text(text)
    assert load(str(file)) == Settings()


def test_the_device_root_follows_the_driver_root(file: Path) -> None:
    file.write_text("root: /run/nvidia/driver\n")
    assert load(str(file)) == Settings(root="/run/nvidia/driver", dev_root="/run/nvidia/driver")


def test_an_absent_default_file_means_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load(absent)
    monkeypatch.setattr(module, "DEFAULT_PATH", absent)
    assert load(absent) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rooot: /x\n", "unknown setting 'rooot'; did you mean `root`"),
        ("mask-proc: true\n", "did you mean `mask_proc`"),
        ("zzzzzz: 1\n", "the settings are root, dev_root"),
        ("1: /x\n", "unknown setting 1"),
        ("root: x/y\n", "`root` is 'x/y', expected an absolute path"),
        ("root: /x/../y\n", "absolute path without `..`"),
        ("root: [/x]\n", "`root` is a list, expected an absolute path"),
        ("library_search_path: /x\n", "expected a list of absolute paths"),
        (
            "library_search_path: [/x, x]\n",
            "`library_search_path` has 'x', expected a list of absolute paths",
        ),
        ("nvml_timeout_s: 0\n", "seconds above 0"),
        ("nvml_timeout_s: true\n", "seconds above 0"),
        ("nvml_timeout_s: .nan\n", "seconds above 0"),
        ("nvml_timeout_s: .inf\n", "at most 86400"),
        ("supported_capabilities: all\n", "expected a list of compute"),
        ("supported_capabilities: [compute, cuda]\n", "expected a list of compute"),
        ("supported_capabilities: [[compute]]\n", "expected a list of compute"),
        ("cgroups: 1\n", "`cgroups` is 1, expected true or false"),
        ("unprivileged_env: true\n", "`unprivileged_env` is True, expected one of accept, ignore, refuse"),
        ("accept_mount_lists: 'yes'\n", "expected true or false"),
        ("swarm_resource: DOCKER_RESOURCE_GPU\n", "expected a list of DOCKER_RESOURCE_<NAME>"),
        ("swarm_resource: [GPU]\n", "`swarm_resource` has 'GPU', expected a list of DOCKER_RESOURCE_<NAME>"),
        ("swarm_resource: [1]\n", "expected a list of DOCKER_RESOURCE_<NAME>"),
        ("parts: [firmware]\n", "`parts` is a list, expected a mapping of switches: application_profile, drm_nodes"),
        ("parts: {firmwares: false}\n", "`parts` has 'firmwares', expected a mapping of switches"),
        ("runtimes: []\n", "`runtimes` is a list, expected a list of names"),
        (
            "cdi_annotation_prefixes: [cdi.k8s.io/, x/]\n",
            "`cdi_annotation_prefixes` has 'x/', expected a list of prefixes that end in cdi.k8s.io/",
        ),
        ("parts: {firmware: 0}\n", "`parts` has 0, expected true or false for the switch firmware"),
        ("cuda_compat: mount\n", "`cuda_compat` is 'mount', expected cache or disabled"),
        ("device_nodes: make\n", "`device_nodes` is 'make', expected one of create, replace, print"),
        ("device_nodes: [create]\n", "`device_nodes` is a list, expected one of"),
        ("modprobe: modprobe\n", "`modprobe` is 'modprobe', expected an absolute path"),
        ("root: /x\nparts: {}\nroot: /y\n", "line 3: `root` is stated again, first in line 1; keep one"),
        ("parts:\n  mps: true\n  mps: true\n", "line 3: `mps` is stated again, first in line 2"),
        ("[" * 3000, "its lists and mappings are too deep"),
        ("- root\n", "holds a list, expected lines"),
        ("text\n", "holds 'text', expected lines"),
        ("root: /x\n  y: [\n", "line 2 is not YAML"),
        ("root: 2021-13-45\n", "not YAML that nvct reads"),
        ("a: &a [1]\nb: *c\n", "line 2 is not YAML"),
        ("root: !!python/object/apply:os.getcwd []\n", "line 1 is not YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(str(file))
    assert message in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod go-w"):
        load(str(file))


def test_a_link_is_refused(file: Path) -> None:
    link = file.with_name("link.yaml")
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        load(str(link))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        load(str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o644)
    with pytest.raises(ConfigError, match="not a regular file"):
        load(str(fifo))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_a_stranger_is_refused(file: Path) -> None:
    os.chown(file, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to uid 12345.*chown root"):
        load(str(file))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_an_unreadable_file_is_named(file: Path) -> None:
    file.chmod(0)
    with pytest.raises(ConfigError, match="cannot be opened"):
        load(str(file))


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"root: /\xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(str(file))


def test_an_endless_file_is_refused(file: Path) -> None:
    file.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="longer than"):
        load(str(file))


def test_aliases_cannot_make_a_message_endless(file: Path) -> None:
    doubling = "".join(f" - &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    file.write_text("root:\n - &a0 [x, x]\n" + doubling)
    with pytest.raises(ConfigError, match="`root` is a list"):
        load(str(file))


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("root:/ \n-[]{}&*!?|>'\"%@`0123456789.,=_mskpc#<~eE+\t"), max_size=60))
def test_any_text_is_settings_or_refused(file: Path, text: str) -> None:
    file.write_text(text)
    try:
        loaded = load(str(file))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(loaded, Settings)


paths = st.sampled_from(["/", "/run/nvidia/driver", "/host/proc"])
all_settings = st.builds(
    Settings,
    root=paths,
    dev_root=paths,
    proc_root=paths,
    library_search_path=st.lists(paths, unique=True).map(tuple),
    device_table=st.sampled_from(["", "/run/table"]),
    nvml_timeout_s=st.floats(min_value=0.1, max_value=86400),
    supported_capabilities=st.sets(st.sampled_from(CAPABILITIES)).map(
        lambda names: tuple(name for name in CAPABILITIES if name in names)
    ),
    cgroups=st.booleans(),
    mask_proc=st.booleans(),
    unprivileged_env=st.sampled_from(["accept", "ignore", "refuse"]),
    accept_mount_lists=st.booleans(),
    swarm_resource=st.sampled_from([(), ("DOCKER_RESOURCE_GPU",)]),
    disable_require=st.booleans(),
    imex_channels=st.booleans(),
    load_kernel_modules=st.booleans(),
    modprobe=st.sampled_from(["", "/sbin/modprobe"]),
    device_nodes=st.sampled_from(["create", "replace", "print"]),
    sys_root=st.sampled_from(["/sys", "/host/sys"]),
    parts=st.fixed_dictionaries({part: st.booleans() for part in PARTS}),
    cuda_compat=st.sampled_from(["cache", "disabled"]),
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(value=all_settings)
def test_settings_survive_json_and_yaml(file: Path, value: Settings) -> None:
    import yaml

    assert from_json(to_json(value)) == value
    file.write_text(yaml.safe_dump(to_json(value)))
    assert load(str(file)) == value


@pytest.mark.parametrize("change", [{"extra": 1}, {"root": None}])
def test_settings_of_another_version_are_stale(change: dict) -> None:
    values = {**to_json(Settings()), **change}
    if change.get("root", "") is None:
        del values["root"]
    with pytest.raises(StaleInventory, match="nvct refresh"):
        from_json(values)
    with pytest.raises(StaleInventory):
        from_json([])
