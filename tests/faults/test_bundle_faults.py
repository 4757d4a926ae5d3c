"""The runtime while it writes a bundle: a step fails, or a signal ends it. All or nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.sim import bundle as bundles
from tests.support.editing import Editing, editing
from tests.support.nodes import SimNode

DEVICES = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def links(tmp_path: Path) -> Path:
    folder = tmp_path / "char"
    folder.mkdir()
    return folder


@pytest.fixture
def runtime(dgx: SimNode, tmp_path: Path, links: Path) -> Iterator[Editing]:
    with editing(tmp_path / "settings", dgx) as made:
        own = re.sub("(?m)^char_links: .*", f"char_links: {links}", made.settings.read_text())
        made.settings.write_text(own)
        warm = tmp_path / "warm"
        bundles.make_rootfs(warm / "rootfs")
        bundles.write_config(warm, bundles.config(["true"], {DEVICES: "2"}, {}))
        made.edited(warm)  # keeps the inventory, so that what follows writes the bundle alone
        assert os.listdir(links) != []
        for link in links.iterdir():
            link.unlink()
        yield made


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    bundles.make_rootfs(folder / "rootfs")
    bundles.write_config(folder, bundles.config(["true"], {DEVICES: "0:1"}, {}))
    return folder


def under(runtime: Editing, strace: str, inject: str, folder: Path) -> None:
    runtime._command[:0] = [strace, "-f", "-qq", "-o", str(folder / "trace"), "-e", f"inject={inject}"]


@pytest.mark.parametrize("step", [1, 2])
def test_where_a_file_cannot_be_replaced_nothing_was_changed(
    runtime: Editing, strace: str, bundle: Path, links: Path, tmp_path: Path, step: int
) -> None:
    text = (bundle / "config.json").read_text()
    under(runtime, strace, f"rename:error=EIO:when={step}", tmp_path)
    done = runtime.create(bundle)
    name = ["nvct-changes.json", "config.json"][step - 1]
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"nvct: write {bundle}/{name}: Input/output error; nothing was changed; ")
    assert (bundle / "config.json").read_text() == text
    assert sorted(os.listdir(bundle)) == ["config.json", "rootfs"]
    assert os.listdir(links) == []


@pytest.mark.parametrize("step", [1, 2])
def test_a_signal_comes_when_the_bundle_is_written(
    runtime: Editing, strace: str, bundle: Path, tmp_path: Path, step: int
) -> None:
    under(runtime, strace, f"rename:signal=TERM:when={step}", tmp_path)
    assert runtime.create(bundle).returncode != 0
    assert sorted(os.listdir(bundle)) == ["config.json", "nvct-changes.json", "rootfs"]
    assert f"{DEVICES}=void" in json.loads((bundle / "config.json").read_text())["process"]["env"]


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_killed_start_left_is_gone_after_the_next(
    runtime: Editing, strace: str, bundle: Path, tmp_path: Path, step: int
) -> None:
    plain = list(runtime._command)
    under(runtime, strace, f"rename:signal=KILL:when={step}", tmp_path)
    assert runtime.create(bundle).returncode != 0
    runtime._command[:] = plain
    assert f"{DEVICES}=void" in runtime.edited(bundle)["process"]["env"]
    assert sorted(os.listdir(bundle)) == ["config.json", "nvct-changes.json", "rootfs"]
