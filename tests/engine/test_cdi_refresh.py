"""`nvct cdi refresh`: a spec that follows the node, and is not there when there is nothing to tell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct.cdi import generate as generating
from nvct.cdi import place, refresh
from nvct.cdi.generate import Choices
from nvct.errors import ConfigError
from nvct.sim.node import spec_from_profile
from tests.support.nodes import SimNode
from tests.support.runc import TREE

pytestmark = pytest.mark.engine

# More than a watch needs by far; what it waits for comes, or the test has failed.
PATIENCE_S = 60


def names(path: Path) -> set[str]:
    """The devices of a spec, none where there is no spec."""
    try:
        spec: dict[str, Any] = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return set()
    return {device["name"] for device in spec["devices"]}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.05)


@contextmanager
def watching(node: SimNode, output: Path) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-I", str(TREE / "nvct/__main__.py"), "--config", str(node.config)]
    command = [*program, "cdi", "refresh", "--watch", "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watch:
        try:
            yield watch
        finally:
            watch.terminate()


MIG_UUID = "MIG-b87bc5b7-41c9-5aa9-b987-215e08c8abc0"


def test_a_watch_follows_mig_devices_and_the_driver(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "cdi/nvidia.yaml"
    driver, aside = own_dgx.path / "proc/driver/nvidia", own_dgx.path / "proc/driver/aside"
    with watching(own_dgx, output) as watch:
        until(lambda: MIG_UUID in names(output))
        assert {"0:6", "1:2", "7", "all", "none"} <= names(output)

        own_dgx.make(spec_from_profile("dgx-a100", mig={0: ("3g.20gb",), 2: ("7g.40gb",)}))
        until(lambda: "2:0" in names(output))
        assert not {MIG_UUID, "0:1", "1:0"} & names(output)
        assert "0:0" in names(output)

        os.rename(driver, aside)
        until(lambda: not output.exists())
        os.rename(aside, driver)
        until(lambda: "2:0" in names(output))
        assert [path.name for path in output.parent.iterdir()] == ["nvidia.yaml"]
        assert watch.poll() is None


def test_a_spec_that_cannot_be_told_is_taken_away(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "nvidia.yaml"
    config = str(own_dgx.config)
    outcome = refresh.refresh(config, str(output), "yaml", Choices())
    assert (outcome.what, outcome.error) == ("written", None)
    assert refresh.refresh(config, str(output), "yaml", Choices()).what == "unchanged"

    shutil.rmtree(own_dgx.path / "proc/driver/nvidia")
    outcome = refresh.refresh(config, str(output), "yaml", Choices())
    assert outcome.what == "removed"
    assert "nvidia" in str(outcome.error)
    assert list(tmp_path.glob("nvidia.yaml*")) == []
    assert refresh.refresh(config, str(output), "yaml", Choices()).what == "absent"


def test_systemd_finds_every_node_of_a_spec(own_dgx: SimNode, tmp_path: Path) -> None:
    """Which it looks for by number (systemd.resource-control(5), DeviceAllow=), when it makes the rules anew."""
    links = own_dgx.path / "dev/char"
    assert list(links.iterdir()) == []
    refresh.refresh(str(own_dgx.config), str(tmp_path / "nvidia.yaml"), "yaml", Choices())
    spec = yaml.safe_load((tmp_path / "nvidia.yaml").read_text())
    parts = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
    said = [node for part in parts for node in part.get("deviceNodes", ())]
    nodes = {node["hostPath"]: f"{node['major']}:{node['minor']}" for node in said}
    assert {link.name for link in links.iterdir()} == set(nodes.values())
    assert all((links / name).samefile(path) for path, name in nodes.items())


def refreshed(node: SimNode, output: Path, choices: Choices | None = None) -> refresh.Outcome:
    return refresh.refresh(str(node.config), str(output), "yaml", choices or Choices())


def test_a_mistake_takes_no_good_spec_away(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "nvidia.yaml"
    refreshed(own_dgx, output)
    good = output.read_text()
    mistakes = (Choices(tokens=("0:9",)), Choices(version="0.3.0"), Choices(hook="", tokens=("no-such",)))
    for choices in mistakes:
        outcome = refreshed(own_dgx, output, choices)
        assert outcome.what == "left as it was"
        assert outcome.error
        assert output.read_text() == good
    own_dgx.config.write_text("colour: red\n")
    outcome = refreshed(own_dgx, output)
    assert (outcome.what, output.read_text()) == ("left as it was", good)
    assert "unknown setting 'colour'" in str(outcome.error)


def test_an_installation_without_the_hook_keeps_a_true_spec(
    own_dgx: SimNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "nvidia.yaml"
    refreshed(own_dgx, output)

    def nowhere() -> str:
        raise ConfigError("no hook")

    monkeypatch.setattr(generating, "_find_hook", nowhere)
    assert refreshed(own_dgx, output).what == "left as it was"


def test_a_spec_of_a_device_that_is_gone_is_no_mistake(own_dgx: SimNode, tmp_path: Path) -> None:
    """The same command line as ever names what is no more: the spec would hand out another device's nodes."""
    output, choices = tmp_path / "nvidia.yaml", Choices(tokens=("0:6",))
    assert refreshed(own_dgx, output, choices).what == "written"
    own_dgx.make(spec_from_profile("dgx-a100", mig={0: ("3g.20gb",)}))
    outcome = refreshed(own_dgx, output, choices)
    assert (outcome.what, output.exists()) == ("removed", False)
    assert "0:6" in str(outcome.error)


def test_wrong_settings_keep_no_spec_that_the_machine_belies(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "nvidia.yaml"
    refreshed(own_dgx, output)
    node = yaml.safe_load(output.read_text())["devices"][0]["containerEdits"]["deviceNodes"][0]["hostPath"]
    os.unlink(node)
    own_dgx.config.write_text("colour: red\n")
    assert refreshed(own_dgx, output).what == "removed"


def test_somebody_elses_spec_stays_with_a_driver_and_without(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "nic.yaml"
    output.write_text(text("theirs"))
    outcome = refreshed(own_dgx, output)
    assert outcome.what == "left as it was"
    assert f"{output} has devices of the kind a.b/c, expected nvidia.com/gpu" in str(outcome.error)
    shutil.rmtree(own_dgx.path / "proc/driver/nvidia")
    assert refreshed(own_dgx, output).what == "left as it was"
    assert output.read_text() == text("theirs")


def test_a_watch_keeps_its_file(own_dgx: SimNode, tmp_path: Path) -> None:
    output = tmp_path / "cdi/nvidia.yaml"
    with watching(own_dgx, output) as watch:
        until(lambda: MIG_UUID in names(output))
        good = output.read_text()
        output.unlink()
        until(lambda: output.exists() and output.read_text() == good)
        output.write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n")
        until(lambda: output.read_text() == good)
        output.chmod(0o600)
        until(lambda: output.stat().st_mode & 0o777 == 0o644)
        output.write_text(text("theirs"))
        until(lambda: "left as it was" in readable(watch))
        assert output.read_text() == text("theirs")
        output.unlink()
        until(lambda: output.exists() and output.read_text() == good)
        assert watch.poll() is None


def readable(watch: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert watch.stdout
    return watch.stdout.readline()


def text(mark: str) -> str:
    return f"kind: a.b/c\nmark: {mark}\n"


def test_a_write_that_fails_leaves_the_old_spec(
    root_user: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "nvidia.yaml"
    place.write(str(output), text("old"), "a.b/c")

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        place.write(str(output), text("new"), "a.b/c")
    assert output.read_text() == text("old")
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia.yaml"]


def test_the_kernels_events_end_a_wait(root_user: None) -> None:
    events = refresh._Events()
    place = Path("/sys/class/mem/null/uevent")
    try:
        place.write_text("change")
    except OSError as error:
        pytest.skip(f"no event can be made here: {error}")
    assert events.wait(PATIENCE_S)
