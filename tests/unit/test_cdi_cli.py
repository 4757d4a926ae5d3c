"""`nvct cdi`: what it prints and writes, its errors and exit codes, over a saved inventory."""

from __future__ import annotations

import json
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
from nvct.errors import DriverError
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
    path.write_text("something else")
    path.chmod(0o600)
    assert on_node("cdi", "generate", "--output", str(path)).exit_code == 0
    status = path.stat()
    assert status.st_mode & 0o777 == 0o644
    assert on_node("cdi", "generate", "--output", str(path)).stdout.endswith(", as before\n")
    assert path.stat() == status


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
        (("--vendor", "1"), 1, "'1/gpu' is no kind of CDI devices"),
        (("--cdi-version", "0.4.0"), 1, "CDI 0.4.0 cannot say that the device name `0` begins with a digit"),
        (("--mode", "imex", "--device", "0"), 1, "devices can be chosen in mode gpu only"),
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
    "removed": (Outcome("removed", error=DriverError("no driver")), 3, "", "nvct: no driver\n"),
    "absent": (Outcome("absent", error=DriverError("no driver")), 3, "", "nvct: no driver\n"),
}


@pytest.mark.parametrize(("outcome", "code", "printed", "complaint"), OUTCOMES.values(), ids=OUTCOMES)
def test_refresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome, code: int, printed: str, complaint: str
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(refresh, "refresh", lambda *arguments: asked.append(arguments) or outcome)
    path = tmp_path / "s.json"
    done = bare("cdi", "refresh", "--output", str(path), "--no-hooks")
    assert (done.exit_code, done.stdout, done.stderr) == (code, printed.format(path=path), complaint)
    ((config, output, form, choices),) = asked
    assert (config, output, form) == ("/etc/nvct/config.yaml", str(path), "json")
    assert not choices.hooks  # type: ignore[attr-defined]
    assert bare("cdi", "refresh", "--quiet", "--output", str(path)).stdout == ""


def test_refresh_is_about_this_machine(on_node: Nvct) -> None:
    done = on_node("cdi", "refresh")
    assert done.exit_code == 2
    assert "leave out --root and --inventory" in done.stderr
