"""The command line over a saved inventory: what each command prints, plain and as JSON, its errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import nvct
from nvct.cli.exits import EXITS, exit_code, one_line
from nvct.cli.main import cli
from nvct.cli.output import count, gib
from nvct.cli.plan import _VARIABLES
from nvct.errors import ChoiceError, ConfigError, DriverError, InjectionError, NvctError, RequestError, StaleInventory
from nvct.model import (
    BINARY,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    SOCKET,
    DeviceNode,
    DriverFile,
    Gpu,
    Inventory,
    MigDevice,
    Roots,
)
from nvct.node.cache import cache_path
from nvct.node.current import Current
from nvct.node.saved import inventory_to_json
from nvct.request import request_from_env
from nvct.settings import Settings

TREE = Path(nvct.__file__).parent

SMALL = MigDevice(0, "MIG-11111111-0000-5000-8000-000000000001", "1g.5gb", 7, 0, 4864, 66, 67)
LARGE = MigDevice(1, "MIG-22222222-0000-5000-8000-000000000002", "3g.20gb", 2, 0, 19968, 21, 22)
SPLIT = Gpu(
    index=0,
    uuid="GPU-aaaaaaaa-1111-4111-8111-111111111111",
    minor=2,
    bus_id="00000000:47:00.0",
    model="NVIDIA A100-SXM4-40GB",
    brand="Nvidia",
    compute_capability="8.0",
    memory_mib=40960,
    mig_enabled=True,
    mig_devices=(SMALL, LARGE),
)
WHOLE = Gpu(
    index=1,
    uuid="GPU-bbbbbbbb-2222-4222-8222-222222222222",
    minor=0,
    bus_id="00000000:07:00.0",
    model="NVIDIA A100-SXM4-40GB",
    brand="Nvidia",
    compute_capability="8.0",
    memory_mib=40960,
)
UNSPLIT = Gpu(
    index=2,
    uuid="GPU-cccccccc-3333-4333-8333-333333333333",
    minor=1,
    bus_id="00000000:0F:00.0",
    model="NVIDIA A30",
    brand="Nvidia",
    compute_capability="8.0",
    memory_mib=24576,
    mig_enabled=True,
)
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
INVENTORY = Inventory(
    driver_version="550.163.01",
    cuda_version="12.4",
    architecture="x86_64",
    roots=Roots(root="/node", dev_root="/node", proc_root="/node/proc"),
    majors={"nvidia": 195, "nvidia-uvm": 234, "nvidia-caps": 235},
    gpus=(SPLIT, WHOLE, UNSPLIT),
    nodes=(DeviceNode("/dev/nvidiactl", 195, 255), DeviceNode("/dev/nvidia-uvm", 234, 0)),
    files=(
        DriverFile(LIBRARY, "compute", f"{LIBRARIES}/libcuda.so.550.163.01", "libcuda.so.1", ("libcuda.so",)),
        DriverFile(LIBRARY, "utility", f"{LIBRARIES}/libnvidia-ml.so.550.163.01", "libnvidia-ml.so.1"),
        DriverFile(LIBRARY32, "compute", "/usr/lib/i386-linux-gnu/libcuda.so.550.163.01", "libcuda.so.1"),
        DriverFile(BINARY, "utility", "/usr/bin/nvidia-smi"),
        DriverFile(FIRMWARE, "utility", "/lib/firmware/nvidia/550.163.01/gsp_ga10x.bin"),
        DriverFile(SOCKET, "utility", "/run/nvidia-persistenced/socket"),
    ),
    missing=("libnvidia-encode.so.1: no video encoding in containers",),
)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run nvct on the saved inventory above, with settings that say nothing."""
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps(inventory_to_json(INVENTORY)))
    return lambda *arguments: bare("--config", settings(tmp_path), "--inventory", str(saved), *arguments)


def bare(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="nvct")


def settings(folder: Path, text: str = "{}\n") -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def printed(result: Result) -> list[str]:
    """The lines of a successful run; as in any pipe they hold no colour and no blanks at their ends."""
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    assert lines == [line.rstrip() for line in lines]
    return lines


def line_of(result: Result) -> str:
    """The line of a run that failed."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("nvct: ")
    return line


# list


def test_list_names_every_device_as_it_can_be_asked_for(run: Run) -> None:
    lines = printed(run("list"))
    assert lines[0] == "Driver 550.163.01, CUDA 12.4"
    assert lines[1].split() == ["Device", "Model", "or", "profile", "Memory", "UUID", "Bus", "id", "Node"]
    whole = "1 NVIDIA A100-SXM4-40GB 40.0 GiB GPU-bbbbbbbb-2222-4222-8222-222222222222 00000000:07:00.0 /dev/nvidia0"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "0 NVIDIA A100-SXM4-40GB 40.0 GiB GPU-aaaaaaaa-1111-4111-8111-111111111111 00000000:47:00.0 /dev/nvidia2",
        "0:0 1g.5gb 4.8 GiB MIG-11111111-0000-5000-8000-000000000001",
        "0:1 3g.20gb 19.5 GiB MIG-22222222-0000-5000-8000-000000000002",
        whole,
        "2 NVIDIA A30 24.0 GiB GPU-cccccccc-3333-4333-8333-333333333333 00000000:0F:00.0 /dev/nvidia1",
        "MIG enabled, no MIG device",
    ]


def test_list_indents_mig_devices_below_their_gpu(run: Run) -> None:
    lines = printed(run("list"))
    starts = [len(line) - len(line.lstrip()) for line in lines[2:5]]
    assert starts == [0, 2, 2]


def test_list_json_has_the_documented_shape(run: Run) -> None:
    listed = json.loads(run("list", "--json").stdout)
    assert listed["driver"] == {"version": "550.163.01", "cuda": "12.4"}
    assert [gpu["index"] for gpu in listed["gpus"]] == [0, 1, 2]
    assert listed["gpus"][0] == {
        "index": 0,
        "uuid": SPLIT.uuid,
        "minor": 2,
        "bus_id": "00000000:47:00.0",
        "model": "NVIDIA A100-SXM4-40GB",
        "brand": "Nvidia",
        "compute_capability": "8.0",
        "memory_mib": 40960,
        "mig": {
            "enabled": True,
            "devices": [
                {
                    "index": 0,
                    "uuid": SMALL.uuid,
                    "profile": "1g.5gb",
                    "gi": 7,
                    "ci": 0,
                    "memory_mib": 4864,
                    "capabilities": {"gi": 66, "ci": 67},
                },
                {
                    "index": 1,
                    "uuid": LARGE.uuid,
                    "profile": "3g.20gb",
                    "gi": 2,
                    "ci": 0,
                    "memory_mib": 19968,
                    "capabilities": {"gi": 21, "ci": 22},
                },
            ],
        },
    }
    assert listed["gpus"][1]["mig"] == {"enabled": False, "devices": []}


def test_list_of_a_node_without_gpus(tmp_path: Path) -> None:
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps({**inventory_to_json(INVENTORY), "gpus": []}))
    assert printed(bare("--inventory", str(saved), "list"))[1:] == ["No GPU."]


# info


def test_info_shows_driver_roots_files_and_what_is_missing(run: Run) -> None:
    lines = [" ".join(line.split()) for line in printed(run("info"))]
    for expected in (
        "Driver 550.163.01",
        "CUDA 12.4",
        "Architecture x86_64",
        "Devices 3 GPUs, 2 MIG devices",
        "Driver root /node",
        "Device root /node",
        "procfs /node/proc",
        "Control nodes /dev/nvidiactl 195:255, /dev/nvidia-uvm 234:0",
        "Majors nvidia 195, nvidia-uvm 234, nvidia-caps 235",
        "Capability Libraries 32-bit Binaries Firmware Sockets",
        "compute 1 1 - - -",
        "utility 1 - 1 1 1",
        "Missing",
        "libnvidia-encode.so.1: no video encoding in containers",
    ):
        assert expected in lines


def test_info_files_lists_each_path_once(run: Run) -> None:
    text = "\n".join(printed(run("info", "--files")))
    assert [text.count(f"{file.path}\n") for file in INVENTORY.files] == [1] * len(INVENTORY.files)


def test_info_json_replays_as_the_same_node(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_text(run("info", "--json").stdout)
    assert json.loads(copy.read_text()) == inventory_to_json(INVENTORY)
    again = bare("--inventory", str(copy), "list")
    assert printed(again) == printed(run("list"))


# plan


def test_plan_groups_edits_and_gives_each_its_reason(run: Run) -> None:
    lines = [" ".join(line.split()) for line in printed(run("plan", "--env", "NVIDIA_VISIBLE_DEVICES=1"))]
    assert lines[0] == "Asked for: 1 (from env NVIDIA_VISIBLE_DEVICES)"
    groups = ["Devices", "Mounts", "Links", "Loader cache", "Environment"]
    titles = [line.split(" (")[0] for line in lines]
    assert [title for title in titles if title in groups] == groups
    (device,) = [line for line in lines if line.startswith("/dev/nvidia0 ")]
    assert device.startswith("/dev/nvidia0 195:0 ") and "GPU-bbbbbbbb" in device
    (mount,) = [line for line in lines if line.startswith("/usr/bin/nvidia-smi ")]
    assert mount.split()[1] == "same" and "utility" in mount
    assert "GPUs 0000:07:00.0" in lines
    assert "NVIDIA_VISIBLE_DEVICES void" in lines


def test_plan_json_has_the_documented_shape(run: Run) -> None:
    result = run("plan", "--env", "NVIDIA_VISIBLE_DEVICES=0:1", "--json")
    assert result.exit_code == 0, result.stderr
    edits = json.loads(result.stdout)
    parts = ["devices", "mounts", "links", "loader_cache", "proc", "files", "env", "left_out", "warnings"]
    assert list(edits) == parts
    assert {tuple(device) for device in edits["devices"]} == {("path", "major", "minor", "why")}
    assert {tuple(mount) for mount in edits["mounts"]} == {("source", "target", "options", "why")}
    assert {tuple(link) for link in edits["links"]} == {("path", "target", "why")}
    assert {tuple(entry) for entry in edits["loader_cache"]} == {("name", "path", "bits", "why")}
    numbers = {(device["path"], device["major"], device["minor"]) for device in edits["devices"]}
    assert {("/dev/nvidia2", 195, 2), ("/dev/nvidia-caps/nvidia-cap21", 235, 21)} < numbers
    assert edits["proc"]["gpus"] == ["0000:47:00.0"]


def test_plan_warns_about_the_parent_of_mig_devices(run: Run) -> None:
    lines = printed(run("plan", "--env", "NVIDIA_VISIBLE_DEVICES=0"))
    warnings = lines[lines.index("Warnings") + 1 :]
    assert any("0:0" in line and "0:1" in line for line in warnings)


@pytest.mark.parametrize(("layout", "folder"), [("debian", LIBRARIES), ("lib64", "/usr/lib64")])
def test_plan_layout_says_where_libraries_go(run: Run, layout: str, folder: str) -> None:
    result = run("plan", "--env", "NVIDIA_VISIBLE_DEVICES=all", "--layout", layout, "--json")
    targets = [mount["target"] for mount in json.loads(result.stdout)["mounts"]]
    assert f"{folder}/libcuda.so.550.163.01" in targets


def test_plan_without_a_request_changes_nothing_and_says_how_to_ask(run: Run) -> None:
    lines = printed(run("plan"))
    assert "nothing changes in it" in lines[0] and "--env NVIDIA_VISIBLE_DEVICES=all" in lines[1]
    edits = json.loads(run("plan", "--json").stdout)
    assert not any(edits.values())


def test_plan_says_where_the_request_that_counts_stands(run: Run) -> None:
    lines = printed(run("plan", "--env", "CUDA_VERSION=9.0"))
    assert lines[0].startswith("Asked for: all (from env CUDA_VERSION without NVIDIA_VISIBLE_DEVICES")
    lines = printed(run("plan", "--env", "DOCKER_RESOURCE_GPU=0"))
    assert "let nothing of the request count" in lines[0]
    assert any("swarm_resource: [DOCKER_RESOURCE_GPU]" in line for line in lines)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    process = {"env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=1"]}
    (folder / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "process": process, "root": {"path": "r"}}))
    return folder


def test_plan_reads_a_bundle_and_env_comes_on_top(run: Run, bundle: Path) -> None:
    assert printed(run("plan", "--bundle", str(bundle)))[0].startswith("Asked for: 1 ")
    over = run("plan", "--bundle", str(bundle), "--env", "NVIDIA_VISIBLE_DEVICES=2")
    assert printed(over)[0].startswith("Asked for: 2 ")


def test_plan_of_a_broken_bundle(run: Run, bundle: Path) -> None:
    (bundle / "config.json").write_text("{")
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "config.json is no JSON" in line_of(result)
    (bundle / "config.json").write_text("[" * 100_000)
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "too deep" in line_of(result)
    (bundle / "config.json").write_text('{"ociVersion": "1", "process": {"env": {}}, "root": {}}')
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and str(bundle) in line_of(result)
    (bundle / "config.json").unlink()
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "config.json does not exist: expected" in line_of(result)
    os.mkfifo(bundle / "config.json")
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "not a regular file" in line_of(result)


def test_plan_of_a_bundle_whose_root_is_a_file(run: Run, bundle: Path) -> None:
    (bundle / "r").touch()
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "root.path" in line_of(result)


def test_plan_of_a_bundle_looks_at_its_root_file_system(run: Run, bundle: Path) -> None:
    (bundle / "r" / "usr").mkdir(parents=True)
    assert "/usr/lib64/libcuda.so.550.163.01" in run("plan", "--bundle", str(bundle)).stdout
    (bundle / "r" / "etc").mkdir()
    (bundle / "r" / "etc" / "debian_version").touch()
    assert f"{LIBRARIES}/libcuda.so.550.163.01" in run("plan", "--bundle", str(bundle)).stdout
    over = run("plan", "--bundle", str(bundle), "--layout", "lib64")
    assert "/usr/lib64/libcuda.so.550.163.01" in over.stdout


@pytest.mark.parametrize("root", ["x", {}, {"path": 1}, ["x"], {"path": "a\0b"}, {"path": ""}])
def test_plan_of_a_bundle_without_a_root_path(run: Run, bundle: Path, root: object) -> None:
    spec = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**spec, "root": root}))
    result = run("plan", "--bundle", str(bundle))
    assert result.exit_code == 4 and "root" in line_of(result)


# this machine: refresh, --root


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This machine has the inventory above; the list tells how the commands got at it."""
    asked: list[str] = []

    def answer(how: str) -> Callable[..., Current]:
        return lambda *_: asked.append(how) or Current(Settings(), INVENTORY)

    monkeypatch.setattr("nvct.node.current.current", answer("current"))
    monkeypatch.setattr("nvct.node.current.refresh", answer("refresh"))
    return asked


def test_refresh_discovers_and_says_what_it_found(node: list[str]) -> None:
    lines = printed(bare("refresh"))
    assert node == ["refresh"]
    assert lines[0].startswith("/run/nvct/inventory.json is up to date, after ")
    assert lines[1:] == [
        "Driver 550.163.01, CUDA 12.4, 3 GPUs, 2 MIG devices, 6 driver files",
        "Missing: libnvidia-encode.so.1: no video encoding in containers",
    ]


def test_refresh_json_says_the_same_to_programs(node: list[str]) -> None:
    assert json.loads("\n".join(printed(bare("refresh", "--json")))) == {
        "path": cache_path("/etc/nvct/config.yaml"),
        "driver": {"version": "550.163.01", "cuda": "12.4"},
        "gpus": 3,
        "mig_devices": 2,
        "files": 6,
        "missing": ["libnvidia-encode.so.1: no video encoding in containers"],
    }


def test_refresh_of_an_ordinary_user_says_whom_it_serves(node: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvct.cli.node.cache_path", lambda _: "/run/user/1000/nvct/inventory.json")
    assert printed(bare("refresh"))[-1].startswith("This is kept for you alone")


def test_refresh_quiet_prints_nothing(node: list[str]) -> None:
    assert printed(bare("refresh", "--quiet")) == []
    assert node == ["refresh"]


def test_refresh_if_stale_takes_what_is_fresh(node: list[str]) -> None:
    printed(bare("refresh", "--if-stale"))
    assert node == ["current"]


def test_a_settings_file_is_known_by_its_absolute_path(
    node: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = [printed(bare("--config", config, "refresh"))[0].split()[0] for config in ("a.yaml", f"{tmp_path}/a.yaml")]
    assert stored == [cache_path(f"{tmp_path}/a.yaml")] * 2


@pytest.mark.parametrize("command", [("list",), ("info",), ("plan",)])
def test_commands_take_what_is_fresh(node: list[str], command: tuple[str, ...]) -> None:
    printed(bare(*command))
    assert node == ["current"]


def test_refresh_that_cannot_store_fails(node: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvct.node.current.refresh", lambda _: Current(Settings(), INVENTORY, ("/run/nvct: full",)))
    result = bare("refresh", "--quiet")
    assert result.exit_code == 3 and line_of(result) == "nvct: /run/nvct: full"


def test_refresh_says_that_it_takes_long(node: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvct.cli.node._PATIENCE_S", 0.01)
    monkeypatch.setattr("nvct.node.current.refresh", lambda _: time.sleep(0.2) or Current(Settings(), INVENTORY))
    assert bare("refresh").stderr == "asking the driver what this node has ...\n"
    assert bare("refresh", "--quiet").stderr == ""


def test_root_discovers_there_and_leaves_what_is_kept_alone(
    node: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("nvct.node.discover.discover", lambda settings: asked.append(settings) or INVENTORY)
    printed(bare("--config", settings(tmp_path, "proc_root: /host/proc\n"), "--root", str(tmp_path), "list"))
    assert asked == [Settings(root=str(tmp_path), dev_root=str(tmp_path), proc_root="/host/proc")]
    assert node == []


def test_root_takes_the_procfs_and_sysfs_of_a_driver_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("nvct.node.discover.discover", lambda settings: asked.append(settings) or INVENTORY)
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    printed(bare("--config", settings(tmp_path), "--root", str(tmp_path), "list"))
    (tmp_path / "sys" / "bus" / "pci").mkdir(parents=True)
    printed(bare("--config", settings(tmp_path), "--root", str(tmp_path), "list"))
    assert [(each.proc_root, each.sys_root) for each in asked] == [
        (f"{tmp_path}/proc", "/sys"),
        (f"{tmp_path}/proc", f"{tmp_path}/sys"),
    ]


# errors and exit codes


def test_an_unknown_device_is_one_line_and_exit_code_1(run: Run) -> None:
    result = run("plan", "--env", "NVIDIA_VISIBLE_DEVICES=7")
    assert result.exit_code == 1 and "7" in line_of(result)


def test_wrong_settings_are_exit_code_4(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    result = run("--config", settings(tmp_path / "wrong", "rot: /\n"), "plan", "--env", "NVIDIA_VISIBLE_DEVICES=1")
    assert result.exit_code == 4 and "rot" in line_of(result)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 999}', "\x00"])
def test_a_file_that_is_no_inventory_is_exit_code_4(tmp_path: Path, text: str) -> None:
    saved = tmp_path / "node.json"
    saved.write_text(text)
    result = bare("--inventory", str(saved), "list")
    assert result.exit_code == 4
    assert str(saved) in line_of(result)


def test_an_inventory_of_the_wrong_shape_is_told_by_file_and_field(tmp_path: Path) -> None:
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps({**inventory_to_json(INVENTORY), "majors": 5}))
    result = bare("--inventory", str(saved), "list")
    assert result.exit_code == 4
    assert line_of(result) == f"nvct: {saved}: majors is 5, expected an object"


@pytest.mark.parametrize("option", [("--inventory",), ("sim", "create", "node", "--from")])
def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path, option: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = bare(*option, str(tmp_path / "pipe"), *(() if "sim" in option else ("list",)))
    assert result.exit_code == 2 and "is not a regular file" in line_of(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ("lst",),
        ("list", "--yaml"),
        ("--inventory", "/no/such/file", "list"),
        ("--root", "/", "--inventory", "/etc/passwd", "list"),
        ("plan", "--env", "NVIDIA_VISIBLE_DEVICES"),
        ("plan", "--layout", "windows"),
        ("completion", "ksh"),
        ("--root", "/", "refresh"),
        ("refresh", "--quiet", "--json"),
        ("--config", "", "list"),
        ("list", "--config", "x"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = bare(*arguments)
    assert result.exit_code == 2
    line = line_of(result)
    assert not line.endswith(".") and ("--help`" in line or "before the command" in line)


def test_a_global_option_behind_the_command_is_told_its_place() -> None:
    assert line_of(bare("sim", "profiles", "--inventory", "x")).endswith(
        "--inventory is a global option and stands before the command: nvct --inventory FILE sim profiles"
    )
    assert "global" not in line_of(bare("list", "--no-such"))
    assert "global" not in line_of(bare("--no-such", "list"))


def test_clicks_questions_keep_their_mark() -> None:
    assert line_of(bare("lst")) == "nvct: no such command 'lst', did you mean 'list'? See `nvct --help`"


def test_a_command_that_is_missing_gets_help() -> None:
    for group in ((), ("sim",)):
        result = bare(*group)
        assert result.exit_code in (0, 2) and "Commands:" in result.output and "nvct: " not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("x"), 1),
        (InjectionError("x"), 1),
        (NvctError("x"), 1),
        (DriverError("x"), 3),
        (StaleInventory("x"), 3),
        (PermissionError(13, "Permission denied", "/run/nvct"), 3),
        (click.UsageError("x"), 2),
        (ChoiceError("x"), 2),
        (ConfigError("x"), 4),
    ],
)
def test_exit_codes_follow_the_table(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_a_message_of_several_lines_becomes_one() -> None:
    assert one_line(DriverError("one\n  two")) == "one two"
    assert one_line(PermissionError(13, "Permission denied", "/run/nvct")) == "/run/nvct: Permission denied"


# help, version, completion


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(every_command(cli)), ids=" ".join)
def test_every_help_has_examples(path: tuple[str, ...]) -> None:
    help_text = bare(*path, "--help").stdout
    _, _, examples = help_text.partition("Examples:\n")
    assert examples.lstrip().splitlines(), "no examples"
    assert "nvct" in examples


def test_help_documents_the_exit_codes() -> None:
    help_text = bare("--help").stdout
    for code, meaning, _ in EXITS:
        assert f"  {code}  {meaning}\n" in help_text


def test_version() -> None:
    assert printed(bare("--version")) == [f"nvct, version {nvct.__version__}"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_calls_nvct_back(shell: str) -> None:
    assert "_NVCT_COMPLETE=" + f"{shell}_complete" in bare("completion", shell).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("nvct l", ["plain,list"]),
        ("nvct --config c", ["file,c"]),
        ("nvct --inventory c", ["file,c"]),
        ("nvct --root c", ["dir,c"]),
        ("nvct plan --bundle c", ["dir,c"]),
        ("nvct plan --env NVIDIA_V", ["plain,NVIDIA_VISIBLE_DEVICES="]),
        ("nvct explain --env CUDA", ["plain,CUDA_VERSION="]),
        ("nvct sim create gb", ["plain,gb200"]),
        ("nvct sim create --from /etc/passwd gb", ["dir,gb"]),
        ("nvct sim create t4 gb", ["dir,gb"]),
        ("nvct config import --from c", ["file,c"]),
        ("nvct config import --output c", ["file,c"]),
    ],
)
def test_completion(words: str, completed: list[str]) -> None:
    env = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_NVCT_COMPLETE": "bash_complete"}
    assert CliRunner().invoke(cli, [], prog_name="nvct", env=env).stdout.splitlines() == completed


def test_the_variables_that_are_completed_are_those_that_ask() -> None:
    for name in _VARIABLES:
        assert request_from_env({name: "1"}) != request_from_env({}), name


def test_help_takes_a_wide_terminals_width() -> None:
    command = [sys.executable, "-I", str(TREE / "__main__.py"), "--help"]
    narrow, wide = (
        subprocess.run(
            command, env={"COLUMNS": columns}, capture_output=True, text=True, timeout=60
        ).stdout.splitlines()
        for columns in ("80", "300")
    )
    assert 0 < len(wide) < len(narrow)
    assert max(map(len, wide)) <= 120


# standard output


@pytest.mark.parametrize("arguments", [("list",), ("info", "--json"), ("--help",), ("completion", "bash")])
@pytest.mark.parametrize(("redirection", "said"), [(">/dev/full", "No space left on device"), (">&-", "is closed")])
def test_output_that_cannot_be_written_is_an_error(
    tmp_path: Path, arguments: tuple[str, ...], redirection: str, said: str
) -> None:
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps(inventory_to_json(INVENTORY)))
    nvct_ = [sys.executable, "-I", str(TREE / "__main__.py"), "--inventory", str(saved), *arguments]
    command = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *nvct_]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("nvct: standard output") and line.endswith(said)


@pytest.mark.parametrize("arguments", [("info", "--json"), ("list",), ("--help",), ("list", "--help"), ("--version",)])
def test_a_reader_that_has_gone_is_no_error_to_tell(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps(inventory_to_json(INVENTORY)))
    command = [sys.executable, "-I", str(TREE / "__main__.py"), "--inventory", str(saved), *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed_pipe:
        done = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_errors_that_nobody_reads_keep_their_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-I", str(TREE / "__main__.py"), "no-such-command"], stderr=closed_pipe, timeout=60
        )
    assert done.returncode == 2


def test_a_name_that_the_locale_cannot_write_is_told_in_one_line(tmp_path: Path) -> None:
    config = settings(tmp_path, "root: /srv/n\u00f6de\n")
    done = subprocess.run(
        [sys.executable, str(TREE / "__main__.py"), "--config", config, "list"],
        env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("nvct: ") and "LC_ALL=C.UTF-8" in line


@pytest.mark.parametrize("command", [["-m", "nvct"], ["-I", str(TREE / "__main__.py")]])
def test_runs_as_a_module_and_by_its_path(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--version"],
        cwd=TREE.parent if "-m" in command else tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nvct, version {nvct.__version__}\n", "")


def test_an_interpreter_without_the_dependencies_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(TREE / "__main__.py"), "list"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "has no module 'click'" in done.stderr and len(done.stderr.splitlines()) == 1


# words


def test_amounts_and_counts_in_words() -> None:
    assert (gib(40960), gib(4864)) == ("40.0 GiB", "4.8 GiB")
    assert (count(0, "GPU"), count(1, "GPU"), count(2, "GPU")) == ("0 GPUs", "1 GPU", "2 GPUs")
