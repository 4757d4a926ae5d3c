"""`nvct sim`: options, summaries, and errors before anything is written."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvct.cli.main import cli
from nvct.sim.errors import SimError
from nvct.sim.node import refuse_real_driver
from nvct.sim.profiles import PROFILES
from nvct.sim.toolchain import _cache_folder


@pytest.fixture(autouse=True)
def compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        refuse_real_driver()
    except SimError as error:
        pytest.skip(str(error))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sim", *arguments])


def test_profiles_as_a_table_and_as_json() -> None:
    table = call("profiles").output
    rows = json.loads(call("profiles", "--json").output)
    assert [row["name"] for row in rows] == list(PROFILES)
    assert all(name in table for name in PROFILES)
    dgx = rows[0]
    assert (dgx["gpus"], dgx["driver"], dgx["cuda"], dgx["mig_profiles"][0]) == (8, "550.163.01", "12.4", "1g.5gb")


def test_create_says_what_it_made_and_what_to_try(tmp_path: Path) -> None:
    place = tmp_path / "node"
    done = call("create", "dgx-a100", str(place), "--gpus", "2", "--mig", "0=1g.5gb, 2g.10gb@0", "--mig", "1=")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"{place}: dgx-a100, driver 550.163.01, CUDA 12.4"
    assert "  GPUs     2 x NVIDIA A100-SXM4-40GB" in lines
    assert "  MIG      GPU 0: 1g.5gb, 2g.10gb@0" in lines
    assert "  MIG      GPU 1: on, no devices" in lines
    assert lines[-1] == f"try: nvct --config {place}/config.yaml list"
    assert (place / "config.yaml").is_file()


def test_create_from_a_node_file(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("driver: 470.57.02\ngpus: [{card: t4}, {card: v100}]\n")
    done = call("create", str(tmp_path / "made"), "--from", str(tmp_path / "node.yaml"))
    assert done.exit_code == 0, done.output
    assert "1 x Tesla T4, 1 x Tesla V100-SXM2-16GB" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dgx-a100",), "name a profile and a directory"),
        (("dgx", "{place}"), "no profile 'dgx'; valid: dgx-a100"),
        (("t4", "{place}", "--mig", "x"), "'x' has not the form 0=1g.5gb,1g.5gb"),
        (("t4", "{place}", "--mig", "²=1g.5gb"), "'²=1g.5gb' has not the form 0=1g.5gb,1g.5gb"),
        (("t4", "{place}", "--mig", f"{'9' * 5000}=1g.5gb"), "has not the form"),
        (("t4", "{place}", "--mig", "0=1g.5gb"), "has no MIG"),
        (("t4", "{place}", "--driver", "٥٥٠.54"), "driver version '٥٥٠.54'"),
        (("t4", ""), "the directory has no name"),
        (("", "--from", "{file}"), "unknown key 'nonsense'"),
        (("a30", "{place}", "--mig", "0=1g.6gb", "--mig", "0=2g.12gb"), "GPU 0 has two --mig"),
        (("t4", "{place}", "--driver", "new"), "driver version 'new'"),
        (("t4", "{place}", "--from", "{file}"), "name a directory and no profile"),
        (("{place}", "--from", "{file}", "--gpus", "1"), "go with a profile"),
        (("{place}", "--from", "{file}"), "unknown key 'nonsense'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    file, place = tmp_path / "node.yaml", tmp_path / "node"
    file.write_text("profile: t4\nnonsense: 1\n")
    done = call("create", *(text.format(place=place, file=file) for text in arguments))
    assert done.exit_code == (4 if "nonsense" in said else 1 if "no MIG" in said else 2)
    assert said in " ".join(done.output.split())
    assert not place.exists()


def test_what_is_to_be_pasted_is_quoted(tmp_path: Path) -> None:
    place = tmp_path / "a node's é"
    done = call("create", "t4", str(place))
    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    assert shlex.split(last) == ["try:", "nvct", "--config", f"{place}/config.yaml", "list"]


def test_a_place_where_nothing_can_be_made_is_told_by_its_folder(tmp_path: Path) -> None:
    for place in ("/proc/x", "/proc/x/y"):
        done = call("create", "t4", place)
        assert done.exit_code == 1
        assert done.output.startswith("nvct: nothing can be made in /proc (") and len(done.output.splitlines()) == 1


def test_the_cache_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # nobody can write there
    private = _cache_folder()
    assert private.is_dir() and private.stat().st_mode & 0o077 == 0 and private.stat().st_uid == os.geteuid()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache_folder() == tmp_path / "nvct" / "sim"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_root_takes_nothing_from_another_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "nvct" / "sim"
    theirs.mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache_folder() != theirs
    assert not list(theirs.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [("[" * 5000, "too deep"), ("a: 2026-13-99", "cannot be read"), ("[1]", "holds a list"), ("7", "holds a number")],
)
def test_a_node_file_that_is_none_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "node.yaml").write_text(text)
    done = call("create", str(tmp_path / "made"), "--from", str(tmp_path / "node.yaml"))
    assert done.exit_code == 4
    assert said in done.output and len(done.output.splitlines()) == 1
