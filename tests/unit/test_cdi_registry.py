"""The CDI specs of a machine: which device a name means, and what is said of specs that cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct.cdi.registry import Registry, load, read, resolve
from nvct.errors import ConfigError, RequestError


def spec(*names: str, kind: str = "nvidia.com/gpu", mark: str = "x") -> dict[str, Any]:
    devices = [{"name": name, "containerEdits": {"env": [f"MARK={mark}"]}} for name in names]
    return {"cdiVersion": "0.5.0", "kind": kind, "devices": devices}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """As /etc/cdi and /var/run/cdi."""
    made = [tmp_path / "etc", tmp_path / "run"]
    for folder in made:
        folder.mkdir()
    return made


def loaded(folders: list[Path]) -> Registry:
    return load([str(folder) for folder in folders])


def marks(registry: Registry) -> dict[str, str]:
    return {name: found.device["containerEdits"]["env"][0] for name, found in registry.devices.items()}


def test_both_forms_are_read_and_other_files_are_not(folders: list[Path]) -> None:
    etc, _ = folders
    (etc / "a.yaml").write_text(yaml.safe_dump(spec("0")))
    (etc / "b.json").write_text(json.dumps(spec("1")))
    (etc / "c.yml").write_text(yaml.safe_dump(spec("2")))
    (etc / "d.yaml.123.new").write_text("half a sp")
    registry = loaded(folders)
    assert list(registry.devices) == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert registry.errors == ()


def test_the_later_folder_wins(folders: list[Path]) -> None:
    etc, run = folders
    (etc / "a.yaml").write_text(yaml.safe_dump(spec("0", "1", mark="etc")))
    (run / "z.yaml").write_text(yaml.safe_dump(spec("0", mark="run")))
    registry = loaded(folders)
    assert marks(registry) == {"nvidia.com/gpu=0": "MARK=run", "nvidia.com/gpu=1": "MARK=etc"}
    assert registry.errors == ()
    assert registry.devices["nvidia.com/gpu=0"].file.path == f"{run}/z.yaml"


def test_two_specs_of_one_folder_cancel_a_device(folders: list[Path]) -> None:
    etc, run = folders
    (etc / "a.yaml").write_text(yaml.safe_dump(spec("0", "1", mark="a")))
    for name in "bcd":
        (run / f"{name}.yaml").write_text(yaml.safe_dump(spec("0", f"own-{name}", mark=name)))
    registry = loaded(folders)
    assert list(registry.devices) == [f"nvidia.com/gpu={name}" for name in ("1", "own-b", "own-c", "own-d")]
    assert [path for path, _ in registry.errors] == [f"{run}/{name}.yaml" for name in "bcd"]
    assert all("nvidia.com/gpu=0 is in " in why for _, why in registry.errors)


def test_a_conflict_below_does_not_matter(folders: list[Path]) -> None:
    etc, run = folders
    for name in "ab":
        (etc / f"{name}.yaml").write_text(yaml.safe_dump(spec("0", mark=name)))
    (run / "c.yaml").write_text(yaml.safe_dump(spec("0", mark="run")))
    registry = loaded(folders)
    assert marks(registry) == {"nvidia.com/gpu=0": "MARK=run"}
    assert registry.errors == ()
    assert registry.paths == (f"{etc}/a.yaml", f"{etc}/b.yaml", f"{run}/c.yaml")


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    assert load([str(tmp_path / "none")]) == Registry({}, ())


BROKEN = {
    "yaml": ("x.yaml", "a: [", "is not YAML"),
    "json": ("x.json", "{", "is not JSON"),
    "no spec": ("x.yaml", "kind: nvidia.com/gpu", "is no CDI spec: cdiVersion: missing (and 1 more"),
    "empty": ("x.yaml", "", "is no CDI spec: the spec: expected a mapping"),
    "a name twice in YAML": ("x.yaml", "kind: a\nkind: b\n", ", line 2: `kind` is stated again, first in line 1"),
    "a name twice in JSON": ("x.json", '{"kind": 1, "kind": 2}', ": `kind` is stated twice in one object"),
    "deep": ("x.json", "[" * 100_000, "is not JSON"),
    "not text": ("x.yaml", "\udcff", "is not UTF-8 text"),
}


@pytest.mark.parametrize(("name", "text", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_spec_costs_its_own_devices_only(folders: list[Path], name: str, text: str, why: str) -> None:
    etc, _ = folders
    (etc / "good.yaml").write_text(yaml.safe_dump(spec("0")))
    (etc / name).write_bytes(text.encode(errors="surrogateescape"))
    registry = loaded(folders)
    assert list(registry.devices) == ["nvidia.com/gpu=0"]
    ((path, said),) = registry.errors
    assert path == f"{etc}/{name}"
    assert said.startswith(path)
    assert why in said
    assert "\n" not in said


def test_specs_that_others_can_write_do_not_count(folders: list[Path]) -> None:
    path = folders[0] / "a.yaml"
    path.write_text(yaml.safe_dump(spec("0")))
    path.chmod(0o666)
    registry = loaded(folders)
    assert registry.devices == {}
    assert "mode 0666" in registry.errors[0][1]


def test_folders_that_others_can_write_have_no_specs(folders: list[Path]) -> None:
    etc, run = folders
    for folder in folders:
        (folder / "a.yaml").write_text(yaml.safe_dump(spec("0", mark=folder.name)))
    run.chmod(0o777)
    registry = loaded(folders)
    assert marks(registry) == {"nvidia.com/gpu=0": "MARK=etc"}
    assert registry.errors[0][0] == str(run)
    run.chmod(0o1777)  # as /tmp: what is root's stays as root left it
    assert marks(loaded(folders)) == {"nvidia.com/gpu=0": "MARK=run"}


def test_what_is_no_file(folders: list[Path]) -> None:
    etc, _ = folders
    os.mkfifo(etc / "a.yaml")
    (etc / "b.yaml").mkdir()
    (etc / "c.yaml").symlink_to("nowhere")
    errors = dict(loaded(folders).errors)
    assert errors == {
        f"{etc}/a.yaml": f"{etc}/a.yaml is no file",
        f"{etc}/b.yaml": f"{etc}/b.yaml is no file",
        f"{etc}/c.yaml": f"{etc}/c.yaml: No such file or directory",
    }


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with path.open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match="longer than 16777216 bytes"):
        read(str(path))


def test_names_resolve_to_their_devices(folders: list[Path]) -> None:
    (folders[0] / "a.yaml").write_text(yaml.safe_dump(spec("0", "1")))
    found = resolve(loaded(folders), ["nvidia.com/gpu=1", "nvidia.com/gpu=0", "nvidia.com/gpu=1"])
    assert [(named.name, named.device["name"]) for named in found] == [
        ("nvidia.com/gpu=1", "1"),
        ("nvidia.com/gpu=0", "0"),
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["nvidia.com/gpu=0", "nvidia.com/gpu=9"],
            "`nvidia.com/gpu=9`: no spec has this device; valid are nvidia.com/gpu=0",
        ),
        (
            ["example.com/gpu=0"],
            "`example.com/gpu=0`: no spec has devices of the kind example.com/gpu; see `nvct cdi list`, and have the "
            "software of these devices write its spec",
        ),
        (
            ["nvidia.com/imex-channel=0"],
            "`nvidia.com/imex-channel=0`: no spec has devices of the kind nvidia.com/imex-channel; see "
            "`nvct cdi list`, or write one: `nvct cdi generate`",
        ),
        (["gpu0"], "`gpu0`: no name of a CDI device; expected VENDOR/CLASS=DEVICE"),
    ],
)
def test_a_name_without_a_meaning(folders: list[Path], names: list[str], said: str) -> None:
    etc, run = folders
    (etc / "a.yaml").write_text(yaml.safe_dump(spec("0")))
    with pytest.raises(RequestError) as failure:
        resolve(loaded(folders), names)
    assert str(failure.value).startswith(said)
    (run / "b.yaml").write_text("{")
    (run / "c.yaml").write_text("[")
    with pytest.raises(RequestError) as failure:
        resolve(loaded(folders), names)
    assert str(failure.value).startswith(said)
    assert f"; {run}/b.yaml is not YAML" in str(failure.value)
    assert "c.yaml" not in str(failure.value)
