"""The runtime and user namespaces: under a root engine that maps ids, and as an ordinary user's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nvct.node.cache import cache_path
from tests.engine.test_userns_runc import (
    ENV,
    assert_all_is_owned_by,
    assert_gets_its_devices,
    assert_nothing_is_left,
    wanted_numbers,
)
from tests.support.nodes import SimNode
from tests.support.runc import kernel_hook, nvct_runtime
from tests.support.userns import (
    MAPPED,
    ROOTLESS,
    USER,
    Hooks,
    RootlessContainer,
    make_bundle,
    running,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes containers for other users: needs root"),
    pytest.mark.skipif(not shutil.which("runc"), reason="no runc on this machine (make setup)"),
]


def test_a_root_engine_that_maps_ids(folder: Path, node: SimNode) -> None:
    bundle = make_bundle(folder, {"prestart": [kernel_hook(node.path)]}, ENV, MAPPED, maps=True)
    with running(bundle, runtime=nvct_runtime(node.path)) as container:
        assert_gets_its_devices(container, node)
        assert_all_is_owned_by(container, MAPPED)
        assert {f"c {major}:{minor} rw" for major, minor in wanted_numbers(node)} == {
            rule for rule in container.devices_v1() if rule.endswith(" rw")
        }
        mounts = container.mounts()
        assert {"ro", "nosuid", "noexec"} <= mounts["/dev/nvidiactl"]
        assert "nodev" not in mounts["/dev/nvidiactl"]
    assert_nothing_is_left(folder)


def test_an_ordinary_users_engine(folder: Path, node: SimNode, hooks: Hooks) -> None:
    """`hooks` removes what is kept of the node for the user."""
    node.forget()  # root's, which would do for the user
    bundle = make_bundle(folder, {"prestart": [kernel_hook(node.path)]}, ENV, USER)
    with running(bundle, ROOTLESS, RootlessContainer, nvct_runtime(node.path)) as container:
        assert_gets_its_devices(container, node)
        assert_all_is_owned_by(container, USER)
    assert Path(cache_path(str(node.config), f"/tmp/nvct-{USER}")).exists()
    assert_nothing_is_left(folder)
