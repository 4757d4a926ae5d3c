"""`nvct cdi`: what it prints and writes, its errors and exit codes, over a saved inventory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from test_cdi_spec import PLAIN, VALID

from nvct.cdi import refresh
from nvct.cdi.refresh import Outcome
from nvct.cli.main import cli
from nvct.errors import DriverError, RequestError
from nvct.node.saved import inventory_to_json

Nvct = Callable[..., Result]


def bare(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="nvct")


@pytest.fixture
def on_node(tmp_path: Path) -> Nvct:
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps(inventory_to_json(PLAIN)))
    return lambda *arguments: bare("--inventory", str(saved), *arguments)


def spec_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    spec = yaml.safe_load(result.stdout)
    VALID.validate(spec)
    assert isinstance(spec, dict)
    return spec


def names(spec: dict[str, Any]) -> list[str]:
    return [device["name"] for device in spec["devices"]]


def version(path: Path) -> tuple[int, int]:
    """Another one after every change of the file; not after reading it, as its atime."""
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


def test_a_spec_on_standard_output(on_node: Nvct) -> None:
    spec = spec_of(on_node("cdi", "generate"))
    assert (spec["kind"], spec["cdiVersion"]) == ("nvidia.com/gpu", "0.5.0")
    assert names(spec)[:2] == ["0", PLAIN.gpus[0].uuid]
    assert names(spec)[-2:] == ["all", "none"]
    (hook,) = spec["containerEdits"]["hooks"]
    assert hook["path"].endswith("/hooks/nvct-cdi-hook")
    assert Path(hook["path"]).exists()


@pytest.mark.parametrize(
    ("options", "kind", "some"),
    [
        (
            ("--name", "type-index"),
            "nvidia.com/gpu",
            ["gpu0", "mig0:0", "mig0:1", "mig0:2", "gpu1", "gpu2", "gpu3", "all", "none"],
        ),
        (("--device", "2", "--device", "0:1", "--name", "index"), "nvidia.com/gpu", ["0:1", "2", "all", "none"]),
        (("--vendor", "example.com", "--class", "card", "--name", "index"), "example.com/card", None),
        (("--device", "2,0:1", "--name", "index"), "nvidia.com/gpu", ["0:1", "2", "all", "none"]),
        (("--device", "none"), "nvidia.com/gpu", ["none"]),
        (("--mode", "management"), "management.nvidia.com/gpu", ["all"]),
        (("--mode", "management", "--vendor", "a.b"), "a.b/gpu", ["all"]),
        (("--mode", "imex"), "nvidia.com/imex-channel", ["0", "7", "all"]),
        (("--mode", "gds"), "nvidia.com/gds", ["all"]),
        (("--mode", "gdrcopy", "--class", "x"), "nvidia.com/x", ["all"]),
        (("--mode", "mofed"), "nvidia.com/mofed", ["all"]),
    ],
)
def test_what_a_spec_can_be(on_node: Nvct, options: tuple[str, ...], kind: str, some: list[str] | None) -> None:
    spec = spec_of(on_node("cdi", "generate", *options))
    assert spec["kind"] == kind
    assert some is None or names(spec) == some


def test_without_hooks(on_node: Nvct) -> None:
    assert "hooks" not in spec_of(on_node("cdi", "generate", "--no-hooks"))["containerEdits"]


def test_json_by_option_or_by_the_files_name(on_node: Nvct, tmp_path: Path) -> None:
    expected = spec_of(on_node("cdi", "generate"))
    assert json.loads(on_node("cdi", "generate", "--format", "json").stdout) == expected
    done = on_node("cdi", "generate", "--output", str(tmp_path / "new/folder/spec.json"))
    assert done.stdout == f"{tmp_path}/new/folder/spec.json: 16 device names of the kind nvidia.com/gpu, CDI 0.5.0\n"
    assert json.loads((tmp_path / "new/folder/spec.json").read_text()) == expected
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["spec.json"]


def test_a_file_for_everybody_to_read_that_is_left_alone_when_it_is_right(on_node: Nvct, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("")
    path.chmod(0o600)
    assert on_node("cdi", "generate", "--output", str(path)).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o644
    before = version(path)
    assert on_node("cdi", "generate", "--output", str(path)).stdout.endswith(", as before\n")
    assert version(path) == before


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--output", "spec.txt"), 2, "spec.txt would be passed over: engines read files named *.yaml and *.json"),
        (("--output", "spec.json", "--format", "yaml"), 2, "spec.json is read as JSON"),
        (("--no-hooks", "--hook", "/a"), 2, "exclude each other"),
        (("--name", "index,colour"), 2, "'colour' is no way to name devices; expected of index, uuid, type-index"),
        (("--mode", "csv"), 2, "'csv' is not one of"),
        (("--cdi-version", "0.2.0"), 2, "'0.2.0' is not one of"),
        (("--device", "9"), 1, "`9` in the CDI device"),
        (("--vendor", "1"), 2, "'1/gpu' is no kind of CDI devices"),
        (("--cdi-version", "0.4.0"), 2, "CDI 0.4.0 cannot say that the device name `0` begins with a digit"),
        (("--mode", "imex", "--device", "0"), 2, "devices can be chosen in mode gpu only"),
        (("--mode", "management", "--name", "uuid"), 2, "--name is about mode gpu"),
        (("--output", ""), 2, "--output names no file"),
        (("--vendor", ""), 2, "--vendor is empty"),
        (("--class", ""), 2, "--class is empty"),
        (("--hook", ""), 2, "--hook is empty"),
        (("--device", ""), 2, "--device names no device"),
        (("--device", "0,"), 2, "--device names no device"),
        (("--device", "0,void"), 2, "`void` asks for nothing"),
    ],
)
def test_what_is_refused(on_node: Nvct, options: tuple[str, ...], code: int, said: str) -> None:
    done = on_node("cdi", "generate", *options)
    assert done.exit_code == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("nvct: ")
    assert said in line
    assert done.stdout == ""


def write_spec(path: Path, *devices: str) -> Path:
    edits = {"env": ["A=b"]}
    spec = {"cdiVersion": "0.5.0", "kind": "a.b/c", "devices": [{"name": d, "containerEdits": edits} for d in devices]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(spec))
    return path


def test_list(tmp_path: Path) -> None:
    etc, run = write_spec(tmp_path / "etc/s.yaml", "2", "1"), write_spec(tmp_path / "run/s.yaml", "1")
    (tmp_path / "run/bad.json").write_text("{")
    done = bare("cdi", "list", "--spec-dir", str(etc.parent), "--spec-dir", str(run.parent))
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["Device", "Spec"],
        ["a.b/c=1", str(run)],
        ["a.b/c=2", str(etc)],
    ]
    assert done.stderr.startswith(f"nvct: warning: {tmp_path}/run/bad.json is not JSON")
    listed = json.loads(bare("cdi", "list", "--json", "--spec-dir", str(run.parent)).stdout)
    assert listed["devices"] == [{"name": "a.b/c=1", "spec": str(run)}]
    assert [error["spec"] for error in listed["errors"]] == [f"{tmp_path}/run/bad.json"]


def test_list_without_any(tmp_path: Path) -> None:
    assert bare("cdi", "list", "--spec-dir", str(tmp_path)).stdout == "No CDI device.\n"


def test_validate(tmp_path: Path) -> None:
    good = write_spec(tmp_path / "good.yaml", "1", "2")
    bad = write_spec(tmp_path / "bad.yaml", "1", "1")
    done = bare("cdi", "validate", str(good))
    assert (done.exit_code, done.stdout) == (0, f"{good}: 2 device names of the kind a.b/c, CDI 0.5.0\n")
    for arguments in ((str(good), str(bad)), ("--spec-dir", str(tmp_path))):
        done = bare("cdi", "validate", *arguments)
        assert done.exit_code == 4
        assert f"{bad}: devices[1].name: `1` is there twice\n" in done.stdout
        assert done.stderr == f"nvct: 1 spec of 2 wrong: {bad}\n"


def test_validate_sees_specs_that_cancel_each_other(tmp_path: Path) -> None:
    one, other = write_spec(tmp_path / "a.yaml", "1"), write_spec(tmp_path / "b.yaml", "1")
    done = bare("cdi", "validate", "--spec-dir", str(tmp_path))
    assert (done.exit_code, done.stdout.splitlines()) == (
        4,
        [
            f"{one}: a.b/c=1 is in {other}, too, so that neither counts: remove one",
            f"{other}: a.b/c=1 is in {one}, too, so that neither counts: remove one",
        ],
    )
    assert done.stderr == f"nvct: 2 specs of 2 wrong: {one}, {other}\n"


def test_validate_checks_specs_that_others_outweigh(tmp_path: Path) -> None:
    low, high = write_spec(tmp_path / "low/a.yaml", "1"), write_spec(tmp_path / "high/a.yaml", "1")
    hidden = (tmp_path / "low/b.yaml", tmp_path / "low/c.yaml")
    hidden[0].write_text("kind: x\n")
    write_spec(hidden[1], "1")
    done = bare("cdi", "validate", "--spec-dir", str(low.parent), "--spec-dir", str(high.parent))
    assert done.exit_code == 4
    # That the two below cancel each other costs nothing, since a third one counts.
    assert done.stderr == f"nvct: 1 spec of 4 wrong: {hidden[0]}\n"
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "CDI 0.5.0" in line] == [
        str(low),
        str(hidden[1]),
        str(high),
    ]


def test_validate_names_each_path_once(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "a.yaml", "1")
    path.chmod(0o666)
    for arguments in ((str(path),), ("--spec-dir", str(tmp_path))):
        done = bare("cdi", "validate", *arguments)
        assert done.exit_code == 4
        assert done.stdout.startswith(f"{path} has mode 0666, which lets others change it")


def test_validate_without_any(tmp_path: Path) -> None:
    assert bare("cdi", "validate", "--spec-dir", str(tmp_path)).stdout == "No CDI spec.\n"


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    write_spec(tmp_path / "open/a.yaml", "1")
    (tmp_path / "open").chmod(0o777)
    said = f"no spec in it is read: {tmp_path}/open has mode 0777"
    done = bare("cdi", "validate", "--spec-dir", str(tmp_path / "open"))
    assert done.exit_code == 4
    assert said in done.stdout
    done = bare("cdi", "list", "--spec-dir", str(tmp_path / "open"))
    assert done.stdout == "No CDI device.\n"
    assert said in done.stderr


def test_validate_on_this_machine(tmp_path: Path, on_node: Nvct) -> None:
    path = tmp_path / "nvidia.yaml"
    on_node("cdi", "generate", "--output", str(path))
    assert bare("cdi", "validate", str(path)).exit_code == 0
    done = bare("cdi", "validate", "--host", str(path))
    assert done.exit_code == 4
    assert f"{path}: the node /dev/nvidiactl: No such file or directory\n" in done.stdout


def test_validate_takes_files_or_folders(tmp_path: Path) -> None:
    done = bare("cdi", "validate", "--spec-dir", str(tmp_path), str(tmp_path / "a.yaml"))
    assert done.exit_code == 2


OUTCOMES = {
    "written": (Outcome("written", ("careful",)), 0, "{path} written\n", "nvct: warning: careful\n"),
    "unchanged": (Outcome("unchanged"), 0, "{path} unchanged\n", ""),
    "removed": (Outcome("removed", error=DriverError("no driver")), 3, "", "nvct: no driver; {path} removed\n"),
    "absent": (Outcome("absent", error=DriverError("no driver")), 3, "", "nvct: no driver; {path} absent\n"),
    "kept": (Outcome("left as it was", error=RequestError("no")), 1, "", "nvct: no; {path} left as it was\n"),
}


@pytest.mark.parametrize(("outcome", "code", "printed", "complaint"), OUTCOMES.values(), ids=OUTCOMES)
def test_refresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome, code: int, printed: str, complaint: str
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(refresh, "refresh", lambda *arguments: asked.append(arguments) or outcome)
    path = tmp_path / "s.json"
    done = bare("cdi", "refresh", "--output", str(path), "--no-hooks")
    assert (done.exit_code, done.stdout, done.stderr) == (code, printed.format(path=path), complaint.format(path=path))
    ((config, output, form, choices),) = asked
    assert (config, output, form) == ("/etc/nvct/config.yaml", str(path), "json")
    assert not choices.hooks  # type: ignore[attr-defined]
    done = bare("cdi", "refresh", "--quiet", "--output", str(path))
    assert (done.stdout, done.stderr) == ("", complaint.format(path=path))


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ((), "/var/run/cdi/nvidia.yaml"),
        (("--mode", "management"), "/var/run/cdi/management.nvidia.com-gpu.yaml"),
        (("--mode", "imex"), "/var/run/cdi/nvidia.com-imex-channel.yaml"),
        (("--vendor", "a.b"), "/var/run/cdi/a.b-gpu.yaml"),
    ],
)
def test_each_kind_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], path: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(refresh, "refresh", lambda _, output, *rest: asked.append(output) or Outcome("unchanged"))
    assert bare("cdi", "refresh", *options).stdout == f"{path} unchanged\n"
    assert asked == [path]


def test_a_hook_that_cannot_be_run(tmp_path: Path, on_node: Nvct) -> None:
    hook = tmp_path / "hook"
    for command in (("cdi", "generate"), ("cdi", "refresh", "--output", str(tmp_path / "s.yaml"))):
        done = bare(*command, "--hook", str(hook))
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"nvct: --hook {hook} is no program that can be run")
    # Whether another machine has it, cannot be known here.
    spec = spec_of(on_node("cdi", "generate", "--hook", str(hook)))
    assert spec["containerEdits"]["hooks"][0]["path"] == str(hook)


FOREIGN = {
    "another kind": ("kind: example.com/nic\n", "has devices of the kind example.com/nic, expected nvidia.com/gpu"),
    "no spec": ("a: b\n", "is no CDI spec"),
    "a list": ("- a\n", "is no CDI spec"),
    "no YAML": ("a: [", "is not YAML"),
    "no text": ("\udcff", "is not UTF-8 text"),
}


@pytest.mark.parametrize(("text", "said"), FOREIGN.values(), ids=FOREIGN)
def test_what_is_somebody_elses_stays(on_node: Nvct, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "nic.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = version(path)
    done = on_node("cdi", "generate", "--output", str(path))
    assert (done.exit_code, done.stdout) == (4, "")
    assert said in done.stderr
    assert done.stderr.endswith("name another file with --output, or remove it\n")
    assert version(path) == before
    assert [other.name for other in tmp_path.glob("nic*")] == ["nic.yaml"]


def test_what_is_no_file_stays(on_node: Nvct, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml"):
        done = on_node("cdi", "generate", "--output", str(tmp_path / name))
        assert done.exit_code == 4
        assert f"{name} is no regular file" in done.stderr


def test_a_spec_of_the_kind_is_replaced_whoever_wrote_it(on_node: Nvct, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "nvidia.json", "0")
    path.write_text(path.read_text().replace("a.b/c", "nvidia.com/gpu"))
    path.write_text(json.dumps(yaml.safe_load(path.read_text())))
    assert on_node("cdi", "generate", "--output", str(path)).exit_code == 0
    assert "all" in names(json.loads(path.read_text()))


def test_a_full_disk_is_told_with_the_file(on_node: Nvct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "nvidia.yaml"
    done = on_node("cdi", "generate", "--output", str(path))
    assert (done.exit_code, done.stderr) == (3, f"nvct: {path}: No space left on device\n")


def test_refresh_is_about_this_machine(on_node: Nvct) -> None:
    done = on_node("cdi", "refresh")
    assert done.exit_code == 2
    assert "leave out --root and --inventory" in done.stderr
