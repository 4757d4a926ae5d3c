"""podman gives GPUs by nvct's CDI specs, with the hook and without, in images of both families."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cdi import KIND, generate, hook_free, hook_free_sources, hooked, make_red_hat_root
from tests.support.expect import seen
from tests.support.nodes import SimNode
from tests.support.podman import Podman
from tests.support.runc import StartFailed, explained, make_root

DEVICES = "NVIDIA_VISIBLE_DEVICES"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed: run tools/setup.sh"),
]


@pytest.fixture(scope="module")
def podman(runc: None, dgx: SimNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    with Podman(tmp_path_factory.mktemp("podman"), dgx) as podman:
        yield podman


def root_of(family: str, folder: Path, programs: Path) -> Path:
    rootfs = folder / "rootfs"
    if family == "lib64" and os.uname().machine == "x86_64":
        make_red_hat_root(rootfs)
    else:
        make_root(rootfs, family, True, None)
    for program in programs.iterdir():
        shutil.copy(program, rootfs / "usr/bin")
    return rootfs


@pytest.mark.parametrize("family", ["debian", "lib64"])
@pytest.mark.parametrize("kind", ["hooked", "hook-free"])
def test_a_mig_device_by_its_cdi_name(
    podman: Podman, dgx: SimNode, tmp_path: Path, static_programs: Path, kind: str, family: str
) -> None:
    podman.use(generate(dgx, tmp_path / "nvidia.yaml", *(["--no-hooks"] if kind == "hook-free" else [])))
    usual_root = root_of(family, tmp_path / "usual", static_programs)
    with podman.container(usual_root) as container:
        usual = seen(container, dgx)
    expected = hooked(dgx, ["0:1"], family) if kind == "hooked" else hook_free(dgx, ["0:1"])
    with podman.container(root_of(family, tmp_path / "own", static_programs), f"{KIND}=0:1") as container:
        found = seen(container, dgx, hook_free_sources(dgx) if kind == "hook-free" else None)
        assert "NVIDIA_VISIBLE_DEVICES=void" in Path(f"/proc/{container.pid}/environ").read_text().split("\0")
    for part, value in usual.items():
        for name in value:
            found[part].pop(name, None) if isinstance(value, dict) else found[part].discard(name)
    assert found == expected


def test_explain_does_not_claim_to_know_what_podman_was_asked_for(
    podman: Podman, dgx: SimNode, tmp_path: Path, static_programs: Path
) -> None:
    podman.use(generate(dgx, tmp_path / "nvidia.yaml"))
    stated = ("--env", f"{DEVICES}=0:1", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")
    with podman.container(root_of("debian", tmp_path, static_programs), f"{KIND}=0:1") as container:
        unknown, told = explained(dgx.config, container.pid), explained(dgx.config, container.pid, *stated)
    assert (unknown["asks_for"], unknown["changes"]) == ("unknown", [])
    assert set(unknown["comparison"]["unplanned"]) >= {"/dev/nvidiactl", "/usr/bin/nvidia-smi"}
    assert (told["carrier"], told["asked"][0]["token"]) == ("cdi-spec", "0:1")
    assert (told["comparison"]["absent"], told["comparison"]["unplanned"]) == ([], [])


def test_a_device_that_no_spec_has(podman: Podman, dgx: SimNode, tmp_path: Path, static_programs: Path) -> None:
    podman.use(generate(dgx, tmp_path / "nvidia.yaml", "--device", "2"))
    rootfs = root_of("debian", tmp_path, static_programs)
    with pytest.raises(StartFailed, match=f"{KIND}=3"), podman.container(rootfs, f"{KIND}=3"):
        pass
