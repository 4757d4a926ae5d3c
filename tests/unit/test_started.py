"""Which bundle a running container was started from, and what it asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvct.inject.rootfs import ConfinedRoot
from nvct.node import cache
from nvct.oci import started as module
from nvct.oci.bundle import Bundle
from nvct.oci.spec import Change, with_change
from nvct.oci.started import Started, remember, started
from nvct.sim.bundle import config

VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}
ANSWERED = Change(env=VOID, hook=("/opt/nvct/hooks/nvct-cdi-hook", "nvct-cdi-hook", "createRuntime", "{}"))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setattr(cache, "RUN_DIR", str(folder))
    monkeypatch.setattr(cache, "own_run_dir", lambda: str(folder))
    return folder


@pytest.fixture
def root() -> Iterator[ConfinedRoot]:
    """This process stands for the container's: its root folder is /."""
    root = ConfinedRoot(os.open("/", os.O_PATH | os.O_DIRECTORY))
    yield root
    root.close()


def create(folder: Path, value: str, change: Change = ANSWERED, **more: Any) -> Bundle:
    """A bundle whose container has the root folder of this process, edited as the runtime does it."""
    folder.mkdir(exist_ok=True)
    spec: dict[str, Any] = config(["true"], {"NVIDIA_VISIBLE_DEVICES": value}, {})
    spec["root"]["path"] = "/"
    (folder / "config.json").write_text(json.dumps({**spec, **more}))
    bundle = Bundle.of(str(folder), "config.json")
    bundle.write(with_change(bundle.spec, change))
    remember(bundle)
    return bundle


def ask(root: ConfinedRoot, value: str | None = "void") -> Started:
    return started(os.getpid(), root, {} if value is None else {"NVIDIA_VISIBLE_DEVICES": value})


def tokens(found: Started) -> tuple[str, ...]:
    assert found.request.devices
    return found.request.devices.tokens


def test_what_the_container_asked_for(run_dir: Path, root: ConfinedRoot, tmp_path: Path) -> None:
    create(tmp_path / "bundle", "0:1,4", annotations={"cdi.k8s.io/x": "nvidia.com/gpu=3"})
    found = ask(root)
    assert (tokens(found), found.carrier, found.known) == (("0:1", "4"), "runtime", True)
    assert list(found.request.annotations) == ["cdi.k8s.io/x"]


def test_a_later_process_has_the_variable_of_the_engine(run_dir: Path, root: ConfinedRoot, tmp_path: Path) -> None:
    create(tmp_path / "bundle", "0:1")
    assert ask(root, "0:1").carrier == "runtime"


@pytest.mark.parametrize("value", ["2", "", None])
def test_a_container_that_shares_the_root_folder_is_another(
    run_dir: Path, root: ConfinedRoot, tmp_path: Path, value: str | None
) -> None:
    create(tmp_path / "bundle", "0:1")
    found = ask(root, value)
    assert (found.carrier, found.known) == ("hook", True)
    assert found.request.devices is None or tokens(found) == tuple(filter(None, [value]))


def test_of_two_bundles_with_one_root_folder_none_is_known(run_dir: Path, root: ConfinedRoot, tmp_path: Path) -> None:
    create(tmp_path / "one", "0:1")
    create(tmp_path / "other", "2")
    found = ask(root)
    assert (tokens(found), found.carrier, found.known) == (("void",), "cdi-spec", False)


@pytest.mark.parametrize("spoiled", ["nothing", "bundle", "changes", "config", "root", "folder"])
def test_without_a_bundle_that_says_so_nothing_is_known(
    run_dir: Path, root: ConfinedRoot, tmp_path: Path, spoiled: str
) -> None:
    folder = tmp_path / "bundle"
    bundle = create(folder, "0:1")
    if spoiled == "bundle":
        folder.rename(tmp_path / "elsewhere")
    elif spoiled == "changes":
        (folder / "nvct-changes.json").unlink()
    elif spoiled == "config":
        (folder / "config.json").write_text(json.dumps(bundle.spec))
    elif spoiled == "root":
        spec = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**spec, "root": {"path": "/tmp"}}))
    elif spoiled == "folder":
        run_dir.chmod(0o777)
    assert ask(root).known == (spoiled == "nothing")


def test_who_carried_it_out(run_dir: Path, root: ConfinedRoot, tmp_path: Path) -> None:
    create(tmp_path / "bundle", "2", Change(env=VOID))
    assert ask(root).carrier == "hook-free-runtime"
    hook = ("/opt/nvct/hooks/nvidia-container-runtime-hook", "nvidia-container-runtime-hook", "createRuntime")
    create(tmp_path / "bundle", "2", Change(hook=hook))
    assert ask(root, "2").carrier == "hook"


def test_links_to_removed_bundles_go_with_the_next_start(run_dir: Path, tmp_path: Path) -> None:
    for number in range(3):
        create(tmp_path / f"bundle-{number}", "2")
    assert len(os.listdir(run_dir)) == 3
    for number in range(2):
        (tmp_path / f"bundle-{number}").rename(tmp_path / f"gone-{number}")
    create(tmp_path / "bundle-2", "2")
    (link,) = os.listdir(run_dir)
    assert os.readlink(run_dir / link) == str(tmp_path / "bundle-2")


def test_many_links_to_removed_bundles_are_gone_after_some_starts(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        create(tmp_path / f"bundle-{number}", "2")
    for number in range(40):
        (tmp_path / f"bundle-{number}").rename(tmp_path / f"gone-{number}")
    for pid in range(20):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        create(tmp_path / "bundle", "2")
    assert len(os.listdir(run_dir)) == 1


def test_where_no_link_can_be_left_the_container_starts(
    monkeypatch: pytest.MonkeyPatch, root: ConfinedRoot, tmp_path: Path
) -> None:
    monkeypatch.setattr(module.cache, "own_run_dir", lambda: "/proc/nowhere")
    create(tmp_path / "bundle", "2")
    assert not ask(root).known
