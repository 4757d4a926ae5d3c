"""The hook's early ends, and how it says what went wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvct.inject.rootfs import ConfinedRoot
from nvct.model import Inventory, Roots
from nvct.node import cache
from nvct.oci import give, hook, report
from nvct.settings import Settings

CONFIG = "/etc/nvct/config.yaml"
Stdin = Callable[[str], None]


def unexpected(*_arguments: object) -> None:
    raise AssertionError("this must not be called")


@pytest.fixture
def stdin(tmp_path: Path) -> Iterator[Stdin]:
    """Puts a text on this process's standard input."""
    kept = os.dup(0)

    def put(text: str) -> None:
        (tmp_path / "stdin").write_text(text)
        descriptor = os.open(tmp_path / "stdin", os.O_RDONLY)
        os.dup2(descriptor, 0)
        os.close(descriptor)

    yield put
    os.dup2(kept, 0)
    os.close(kept)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here changes a container, and the environment of the tests outlives the hook's clearing it."""
    monkeypatch.setattr(give, "inject", unexpected)
    monkeypatch.setattr(os.environ, "clear", lambda: None)
    monkeypatch.setattr(report, "_LOG", "/nowhere")


def state(bundle: Path, *env: str) -> str:
    spec = {"ociVersion": "1.0.2", "process": {"args": ["sh"], "env": list(env)}, "root": {"path": "rootfs"}}
    (bundle / "config.json").write_text(json.dumps(spec))
    return json.dumps({"id": "c1", "pid": os.getpid(), "bundle": str(bundle)})


@pytest.mark.parametrize("env", [(), ("NVIDIA_VISIBLE_DEVICES=void", "CUDA_VERSION=9.0"), ("NVIDIA_GDS=enabled",)])
def test_nobody_looks_at_the_node_for_a_container_that_asks_for_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stdin: Stdin,
    capfd: pytest.CaptureFixture[str],
    env: tuple[str, ...],
) -> None:
    monkeypatch.setattr(cache, "load", unexpected)
    stdin(state(tmp_path, *env))
    assert hook.main(["prestart"]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_request_that_does_not_count_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: Stdin, capfd: pytest.CaptureFixture[str]
) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "devices").write_text("Character devices:\n195 nvidia\n\nBlock devices:\n")
    node = Inventory("550.54.15", "12.4", "x86_64", Roots("/", "/", str(proc)), {"nvidia": 195})
    monkeypatch.setattr(cache, "load", lambda _config: (Settings(unprivileged_env="ignore"), node))
    root = ConfinedRoot(os.open(tmp_path, os.O_PATH | os.O_DIRECTORY))
    monkeypatch.setattr(give, "open_root", lambda _container: root)
    stdin(state(tmp_path, "NVIDIA_VISIBLE_DEVICES=all"))
    assert hook.main(["prestart"]) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("nvct: warning: ")
    assert "(unprivileged_env)" in line
    root.close()


def test_a_process_without_a_mount_namespace_of_its_own_is_refused(
    tmp_path: Path, stdin: Stdin, capfd: pytest.CaptureFixture[str]
) -> None:
    stdin(state(tmp_path, "NVIDIA_VISIBLE_DEVICES=all"))
    assert hook.main(["prestart"]) == 1
    assert f"nvct: process {os.getpid()} has no mount namespace of its own" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["-version"], 0, "NVIDIA Container Runtime Hook version"),
        (["-help"], 0, "usage: "),
        (["--debug", "poststart"], 0, ""),
        (["poststop"], 0, ""),
        ([], 2, "usage: "),
        (["-config"], 2, "-config needs a file"),
        (["-colour", "prestart"], 2, "unknown option '-colour'"),
        (["prestart", "prestart"], 2, "usage: "),
        (["dance"], 2, "usage: "),
    ],
)
def test_the_command_line(
    capfd: pytest.CaptureFixture[str], stdin: Stdin, arguments: list[str], status: int, said: str
) -> None:
    stdin("")
    assert hook.main(arguments) == status
    out, err = capfd.readouterr()
    assert said in (err if status else out)
    assert (out if status else err) == ""


def test_a_fault_of_ours_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: Stdin, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: object) -> None:
        raise KeyError("gpus")

    monkeypatch.setattr(hook, "request_from_spec", broken)
    stdin(state(tmp_path))
    assert hook.main(["prestart"]) == 1
    assert capfd.readouterr().err == "nvct: this is a fault of nvct, please report it: KeyError: 'gpus'\n"
