"""Which low-level runtime the runtime calls: the settings and the front must be of one mind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct.errors import ConfigError
from nvct.oci import lowlevel
from nvct.settings import Settings
from tests.support.runc import RUNTIME


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "youki"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def config(folder: Path) -> str:
    return f"{folder}/config.yaml"


def test_the_first_that_there_is(tmp_path: Path, program: str) -> None:
    (tmp_path / "text").write_text("")
    assert lowlevel.find(("/nowhere/runc", f"{tmp_path}/text", str(tmp_path), program, "/bin/true")) == program
    assert lowlevel.find(("no-such-runtime",)) == ""


def test_a_name_is_looked_for_in_the_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    monkeypatch.setattr(lowlevel, "FOLDERS", ("/nowhere", str(tmp_path)))
    assert lowlevel.find(("youki",)) == program


def test_it_never_finds_itself(tmp_path: Path, program: str) -> None:
    link = tmp_path / "runc"
    link.symlink_to(RUNTIME)
    assert lowlevel.find((str(link), program)) == program


def test_the_front_is_told_and_agrees(tmp_path: Path, program: str) -> None:
    settings = Settings(runtimes=("/nowhere", program))
    with pytest.raises(ConfigError, match=f"name /nowhere, {program}, .* calls /usr/bin/runc .*: run `nvct refresh`"):
        lowlevel.check("/usr/bin/runc", config(tmp_path), settings)
    lowlevel.write_choice(config(tmp_path), settings)
    choice = lowlevel.choice_path(config(tmp_path))
    assert os.readlink(choice) == program
    lowlevel.check(choice, config(tmp_path), settings)
    with pytest.raises(ConfigError, match=f"name /bin/true, .* calls {program} "):
        lowlevel.check(choice, config(tmp_path), Settings(runtimes=("/bin/true",)))


def test_what_was_there_before_gives_way(tmp_path: Path, program: str) -> None:
    choice = Path(lowlevel.choice_path(config(tmp_path)))
    choice.write_text("/bin/false\n")
    lowlevel.write_choice(config(tmp_path), Settings(runtimes=(program,)))
    assert os.readlink(choice) == program
    assert sorted(os.listdir(tmp_path)) == ["low-level-runtime", "youki"]


def test_a_link_that_others_could_have_made_is_refused(tmp_path: Path, program: str) -> None:
    settings = Settings(runtimes=(program,))
    lowlevel.write_choice(config(tmp_path), settings)
    choice = lowlevel.choice_path(config(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{tmp_path} has mode 0777, .*; run: chmod go-w"):
        lowlevel.check(choice, config(tmp_path), settings)
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match=f"need the link {choice}, which others could make"):
        lowlevel.write_choice(config(tmp_path), settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a link to another user")
def test_a_strangers_link_is_refused(tmp_path: Path, program: str) -> None:
    settings = Settings(runtimes=(program,))
    lowlevel.write_choice(config(tmp_path), settings)
    choice = lowlevel.choice_path(config(tmp_path))
    os.lchown(choice, 1234, 1234)
    with pytest.raises(ConfigError, match=f"{choice} belongs to uid 1234, expected root.*; remove it"):
        lowlevel.check(choice, config(tmp_path), settings)


def test_a_runtime_that_goes_by_another_name_is_refused(tmp_path: Path, program: str) -> None:
    """It would be called by the name of the link that the front calls."""
    other = tmp_path / "krun"
    other.symlink_to(program)
    with pytest.raises(ConfigError, match=f"name {other}, which is {program} by another name.*: name {program}, or"):
        lowlevel.write_choice(config(tmp_path), Settings(runtimes=(str(other),)))


def test_the_usual_ones_need_no_file(tmp_path: Path, program: str) -> None:
    lowlevel.write_choice(config(tmp_path), Settings(runtimes=(program,)))
    lowlevel.write_choice(config(tmp_path), Settings())
    lowlevel.write_choice(config(tmp_path), Settings())
    assert os.listdir(tmp_path) == ["youki"]


def test_none_of_those_named_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name /nowhere, none of which is on this machine"):
        lowlevel.write_choice(config(tmp_path), Settings(runtimes=("/nowhere",)))
    with pytest.raises(ConfigError, match="none of which is on this machine, but nvct-runtime calls /usr/bin/runc"):
        lowlevel.check("/usr/bin/runc", config(tmp_path), Settings(runtimes=("/nowhere",)))


def test_a_folder_that_cannot_be_written_is_named(program: str) -> None:
    with pytest.raises(ConfigError, match="^/proc/low-level-runtime: .*; it tells nvct-runtime which"):
        lowlevel.write_choice("/proc/config.yaml", Settings(runtimes=(program,)))
