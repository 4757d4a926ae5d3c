"""The hook's two early ends: for a container that asks for nothing, and for one whose request does not count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvct.inject.rootfs import ConfinedRoot
from nvct.model import Inventory, Roots
from nvct.node import cache
from nvct.oci import hook
from nvct.settings import Settings


def unexpected(*_arguments: object) -> None:
    raise AssertionError("this must not be called")


def state(bundle: Path, *env: str) -> bytes:
    spec = {"ociVersion": "1.0.2", "process": {"args": ["sh"], "env": list(env)}, "root": {"path": "rootfs"}}
    (bundle / "config.json").write_text(json.dumps(spec))
    return json.dumps({"pid": os.getpid(), "bundle": str(bundle)}).encode()


@pytest.fixture
def no_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "inject", unexpected)


@pytest.mark.parametrize("env", [(), ("NVIDIA_VISIBLE_DEVICES=void", "CUDA_VERSION=9.0"), ("NVIDIA_GDS=enabled",)])
def test_nobody_looks_at_the_node_for_a_container_that_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_injection: None, env: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cache, "load", unexpected)
    assert hook.give_gpus(state(tmp_path, *env), "/etc/nvct/config.yaml") == ()


def test_a_request_that_does_not_count_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_injection: None
) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "devices").write_text("Character devices:\n195 nvidia\n\nBlock devices:\n")
    node = Inventory("550.54.15", "12.4", "x86_64", Roots("/", "/", str(proc)), {"nvidia": 195})
    monkeypatch.setattr(cache, "load", lambda _config: (Settings(unprivileged_env="ignore"), node))
    root = ConfinedRoot(os.open(tmp_path, os.O_PATH | os.O_DIRECTORY))
    monkeypatch.setattr(hook, "_open_root", lambda *_arguments: root)
    (warning,) = hook.give_gpus(state(tmp_path, "NVIDIA_VISIBLE_DEVICES=all"), "/etc/nvct/config.yaml")
    assert "(unprivileged_env)" in warning
    root.close()
