"""The runtime's command line, its log, and what it makes of a bundle it has seen before."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from nvct.errors import InjectionError, RequestError
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
    for text in ("{", "{}", '{"changes": [{}]}', '{"changes": 1}'):
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
