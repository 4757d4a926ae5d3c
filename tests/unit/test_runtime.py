"""The runtime's command line, its log, and what it makes of a bundle it has seen before."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from nvct.errors import InjectionError, RequestError
from nvct.model import DeviceEdit
from nvct.oci import report, runtime
from nvct.oci.bundle import Bundle
from nvct.oci.runtime import Call, log_line, parse
from nvct.oci.spec import Change, with_change
from nvct.sim.bundle import config


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("create --bundle /b name", Call("create", "/b", container="name")),
        ("create --bundle=/b name", Call("create", "/b", container="name")),
        ("create -b /b name", Call("create", "/b", container="name")),
        ("create -bundle /b name", Call("create", "/b", container="name")),
        ("create -b=/b name", Call("create", "/b", container="name")),
        ("create -b /first --bundle /last name", Call("create", "/last", container="name")),
        ("create name", Call("create", container="name")),
        ("run -d -b /b name", Call("run", "/b", container="name")),
        ("run --detach --pid-file run --console-socket create -b /b name", Call("run", "/b", container="name")),
        ("create --preserve-fds 2 --no-pivot name", Call("create", container="name")),
        ("create -f other.json -b /b name", Call("create", "/b", "other.json", container="name")),
        (
            "--root /r --log /l --log-format json --systemd-cgroup create --bundle /b name",
            Call("create", "/b", log="/l", log_format="json", container="name"),
        ),
        ("--root create --log=/l state create", Call("state", log="/l", container="create")),
        ("--debug kill run 9", Call("kill", container="run")),
        ("exec name create", Call("exec", container="name")),
        ("create -- -name", Call("create", container="-name")),
        ("--log --bundle create c1", Call("create", log="--bundle", container="c1")),
        ("create --pidfd-socket /s --bundle /b c1", Call("create", "/b", container="c1")),
        ("create -b /first -bundle=/last name", Call("create", "/last", container="name")),
        ("exec name run -b/b --bund", Call("exec", container="name")),
        ("--log journald:abc create name", Call("create", container="name")),
        ("--log=syslog:abc create name", Call("create", container="name")),
        ("--log file:/l create name", Call("create", log="/l", container="name")),
        ("--help create", Call()),
        ("create --help", Call()),
        ("--version", Call()),
        ("create --bundle", Call("create")),
        ("--log", Call()),
        ("", Call()),
    ],
)
def test_a_command_line(line: str, call: Call) -> None:
    assert parse(line.split()) == call


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("create -b/b name", Call("create", "/b", container="name")),
        ("run -db/b name", Call("run", "/b", container="name")),
        ("run -db /b name", Call("run", "/b", container="name")),
        ("run -d name", Call("run", container="name")),
        ("create -fother.json --bund /b name", Call("create", "/b", "other.json", container="name")),
        ("create --bund=/b --conf=x.json name", Call("create", "/b", "x.json", container="name")),
        ("create -b=/b name", Call("create", "=/b", container="name")),
        ("create -bundle name", Call("create", "undle", container="name")),
        ("--cgroup disabled --log --bundle create c1", Call("create", log="--bundle", container="c1")),
        ("--log-fo json --syst create name", Call("create", log_format="json", container="name")),
        ("--cri create run name", Call("run", container="name")),
        ("create --usa name", Call()),
        ("run -dh", Call()),
        ("exec name run --con", Call("exec", container="name")),
    ],
)
def test_a_command_line_of_cruns(line: str, call: Call) -> None:
    assert parse(line.split(), as_crun=True) == call


@pytest.mark.parametrize(("line", "as_crun"), [
    ("create -b/b name", False),
    ("run -db/b name", False),
    ("create -fother.json name", False),
    ("create --bund /b name", False),
    ("--lo /l create name", False),
    ("create --con x name", True),
    ("--lo /l create name", True),
    ("--roo create run name", True),
])  # fmt: skip
def test_what_may_be_another_option_to_the_low_level_runtime_is_refused(line: str, as_crun: bool) -> None:
    with pytest.raises(RequestError, match="write (options|the option) out") as caught:
        parse(line.split(), as_crun)
    assert "\n" not in str(caught.value)


def test_a_line_of_the_log_in_json() -> None:
    line = log_line("error", 'nvct: "8" is\nno GPU ü', "json", 0.5)
    assert line.endswith("\n")
    assert json.loads(line) == {"level": "error", "msg": 'nvct: "8" is\nno GPU ü', "time": "1970-01-01T00:00:00Z"}


@pytest.mark.parametrize("form", ["text", ""])
def test_a_line_of_the_log_in_text(form: str) -> None:
    line = log_line("warning", 'nvct: a "b"', form, 86400)
    assert line == 'time="1970-01-02T00:00:00Z" level=warning msg="nvct: a \\"b\\""\n'


def test_with_a_log_errors_alone_go_to_standard_error_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = runtime._RuntimeLog(str(tmp_path / "log"), "json")
    log.warn("careful")
    assert log.failed("no GPU") == 1
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["level"], row["msg"]) for row in rows] == [("warning", "nvct: careful"), ("error", "nvct: no GPU")]
    assert capfd.readouterr().err == "nvct: no GPU\n"


@pytest.mark.parametrize("name", ["log", ""])
def test_both_go_to_the_system_log_with_a_log_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = str(tmp_path / "system")
    monkeypatch.setattr(report, "_LOG", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as system:
        system.bind(path)
        log = runtime._RuntimeLog(str(tmp_path / name) if name else "", "json")
        log.open("box")
        log.warn("careful")
        log.failed("no GPU")
        system.setblocking(False)
        said = [system.recv(1000).decode().partition("]: ") for _ in range(2)]
    assert [(line[0].partition(">")[0], line[2]) for line in said] == [
        ("<28", "container box: warning: careful"),
        ("<27", "container box: no GPU"),
    ]


@pytest.mark.parametrize("path", ["", "/dev/stderr", "/nowhere/log"])
def test_without_a_log_both_go_to_standard_error(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    log = runtime._RuntimeLog(path, "text")
    log.warn("careful")
    log.failed("no GPU")
    assert capfd.readouterr().err == "nvct: warning: careful\nnvct: no GPU\n"


def bundle_in(folder: Path, value: str) -> dict[str, Any]:
    spec: dict[str, Any] = config(["true"], {"NVIDIA_VISIBLE_DEVICES": value}, {})
    (folder / "config.json").write_text(json.dumps(spec))
    return spec


def add(folder: Path) -> None:
    bundle = Bundle.of(str(folder), "config.json")
    bundle.write(with_change(bundle.spec, Change(env={"NVIDIA_VISIBLE_DEVICES": "void"})))


def test_a_bundle_that_is_used_again_is_as_before_the_first_time(tmp_path: Path) -> None:
    spec = bundle_in(tmp_path, "0:1")
    add(tmp_path)
    assert "NVIDIA_VISIBLE_DEVICES=void" in json.loads((tmp_path / "config.json").read_text())["process"]["env"]
    assert Bundle.of(str(tmp_path), "config.json").spec["process"] == spec["process"]


def test_a_spec_that_was_written_anew_counts_as_it_is(tmp_path: Path) -> None:
    bundle_in(tmp_path, "0:1")
    add(tmp_path)
    spec = bundle_in(tmp_path, "5")
    assert Bundle.of(str(tmp_path), "config.json").spec == spec


@pytest.mark.parametrize("value", ["5", "none", None])
def test_an_earlier_request_leaves_nothing_where_the_variable_was_edited(tmp_path: Path, value: str | None) -> None:
    """Also of the request before that one, and where it was a start that ended between the two files."""
    bundle_in(tmp_path, "3")
    for number in (3, 4):
        give(tmp_path, number)
        path = tmp_path / "config.json"
        edited = json.loads(path.read_text())
        kept = [entry for entry in edited["process"]["env"] if not entry.startswith("NVIDIA_VISIBLE_DEVICES=")]
        edited["process"]["env"] = kept if value is None else [*kept, f"NVIDIA_VISIBLE_DEVICES={value}"]
        path.write_text(json.dumps(edited))
        bundle = Bundle.of(str(tmp_path), "config.json")
        assert rules(bundle.spec) == []
        assert bundle.spec["process"]["env"] == edited["process"]["env"]


def give(folder: Path, minor: int) -> None:
    bundle = Bundle.of(str(folder), "config.json")
    rule = DeviceEdit("/dev/nvidia", "/dev/nvidia", 195, minor, "why")
    bundle.write(with_change(bundle.spec, Change(rules=(rule,), env={"NVIDIA_VISIBLE_DEVICES": "void"})))


def rules(spec: dict[str, Any]) -> list[int]:
    return [rule["minor"] for rule in spec["linux"]["resources"]["devices"] if rule.get("major") == 195]


@pytest.mark.parametrize("edited", [False, True])
def test_a_start_that_ends_between_the_two_files_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    bundle_in(tmp_path, "3")
    give(tmp_path, 3)
    path = tmp_path / "config.json"
    if edited:
        path.write_text(path.read_text().replace("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=4"))
    before = path.read_text()
    rename = os.rename

    def rename_once(source: str, target: str) -> None:
        if target == str(path):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_once)
    with pytest.raises(KeyboardInterrupt):
        give(tmp_path, 4)
    monkeypatch.undo()
    assert path.read_text() == before
    spec = Bundle.of(str(tmp_path), "config.json").spec
    assert rules(spec) == []
    value = "4" if edited else "3"
    assert [entry for entry in spec["process"]["env"] if "NVIDIA" in entry] == [f"NVIDIA_VISIBLE_DEVICES={value}"]
    give(tmp_path, 5)
    assert rules(json.loads(path.read_text())) == [5]
    give(tmp_path, 5)
    assert len(json.loads((tmp_path / "nvct-changes.json").read_text())["changes"]) == 2  # none of the earlier ones


def test_another_spec_in_the_same_folder_has_changes_of_its_own(tmp_path: Path) -> None:
    spec = bundle_in(tmp_path, "0:1")
    (tmp_path / "other.json").write_text((tmp_path / "config.json").read_text())
    add(tmp_path)
    other = Bundle.of(str(tmp_path), "other.json")
    assert other.spec == spec
    other.write(with_change(other.spec, Change(env={"A": "1"})))
    for name in ("config.json", "other.json"):
        assert Bundle.of(str(tmp_path), name).spec["process"] == spec["process"]


def test_changes_are_forgotten_with_the_request(tmp_path: Path) -> None:
    spec = bundle_in(tmp_path, "0:1")
    add(tmp_path)
    Bundle.of(str(tmp_path), "config.json").forget_changes()
    assert json.loads((tmp_path / "config.json").read_text())["process"] == spec["process"]
    assert sorted(os.listdir(tmp_path)) == ["config.json"]


def test_the_file_is_replaced_in_one_step_and_keeps_its_mode(tmp_path: Path) -> None:
    bundle_in(tmp_path, "0")
    path = tmp_path / "config.json"
    path.chmod(0o640)
    before = path.stat()
    with path.open() as reader:
        add(tmp_path)
        assert "NVIDIA_VISIBLE_DEVICES=0" in reader.read()
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["config.json", "nvct-changes.json"]


def test_damaged_changes_are_an_error_that_names_it(tmp_path: Path) -> None:
    bundle_in(tmp_path, "0")
    paths: list[list[Any]] = [[], ["process", "args"], [["mounts"]]]
    bad = [json.dumps({"changes": [{"path": path, "came": [], "went": []}]}) for path in paths]
    bad.append('{"changes": [{"path": ["mounts"], "came": "x", "went": []}]}')
    for text in ("{", "{}", '{"changes": [{}]}', '{"changes": 1}', *bad):
        (tmp_path / "nvct-changes.json").write_text(text)
        with pytest.raises(RequestError, match=r"nvct-changes.json is not what nvct writes .*; remove it"):
            Bundle.of(str(tmp_path), "config.json")


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_in(tmp_path, "0")
    text = (tmp_path / "config.json").read_text()

    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InjectionError, match="nvct-changes.json: No space left on device"):
        add(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "config.json").read_text() == text
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize("again", [False, True])
def test_where_the_spec_cannot_be_replaced_its_changes_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    bundle_in(tmp_path, "3")
    if again:
        give(tmp_path, 3)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    rename = os.rename

    def fail_for_the_spec(source: str, target: str) -> None:
        if target.endswith("/config.json"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_spec)
    with pytest.raises(InjectionError, match="config.json: Input/output error; nothing was changed; "):
        give(tmp_path, 4)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_what_a_start_that_was_killed_left_is_replaced(tmp_path: Path) -> None:
    bundle_in(tmp_path, "0")
    for name in ("config.json.nvct", "nvct-changes.json.nvct"):
        (tmp_path / name).write_text("half")
    add(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "nvct-changes.json"]


def test_a_signal_that_ends_a_start_waits_until_the_bundle_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        pass

    def end(_number: int, _frame: object) -> None:
        raise Ended

    old = signal.signal(signal.SIGTERM, end)
    bundle_in(tmp_path, "0")
    rename = os.rename

    def rename_with_signal(source: str, target: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_with_signal)
    try:
        with pytest.raises(Ended):
            add(tmp_path)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, old)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "nvct-changes.json"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in (tmp_path / "config.json").read_text()


def test_a_folder_that_another_start_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle_in(tmp_path, "0")
    monkeypatch.setattr("nvct.oci.bundle._PATIENCE_S", 0)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(InjectionError, match="another process has held .* locked .*; nothing was changed"):
        add(tmp_path)
    os.close(folder)
    add(tmp_path)


def test_a_number_that_cannot_be_written_again_is_refused(tmp_path: Path) -> None:
    bundle_in(tmp_path, "0")
    path = tmp_path / "config.json"
    text = path.read_text().replace("{", '{"zz": 1e400, ', 1)
    path.write_text(text)
    with pytest.raises(RequestError, match="config.json cannot be written again as it was read .*1e308"):
        add(tmp_path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["config.json"]
