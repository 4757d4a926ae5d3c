"""Nothing that surrounds a hook decides anything: not its environment, not its current folder, not the image's."""

from __future__ import annotations

import json
import subprocess
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nvct.sim.bundle import config
from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import HOOK, PYTHON, TREE, hooks_of, nvct_hook

# Stages whose hooks a runtime runs in the container's namespaces, with the image's environment where they name none.
IN_THE_CONTAINER = {"createContainer", "startContainer"}


def hooks_in(spec: object) -> Iterator[tuple[str, dict[str, object]]]:
    """(stage, hook) of every hook in an OCI spec, a CDI spec or a file of an engine's hooks folder."""
    if isinstance(spec, list):
        for item in spec:
            yield from hooks_in(item)
    if not isinstance(spec, dict):
        return
    if isinstance(spec.get("hook"), dict):  # oci-hooks(5)
        yield from ((stage, spec["hook"]) for stage in spec["stages"])
        return
    for name, value in spec.items():
        if name != "hooks":
            yield from hooks_in(value)
        elif isinstance(value, dict):  # an OCI spec: stage → hooks
            yield from ((stage, hook) for stage, hooks in value.items() for hook in hooks)
        else:  # a CDI spec: each hook has a hookName
            yield from ((hook["hookName"], hook) for hook in value)


def emitted() -> Iterator[tuple[str, object]]:
    """Every spec that nvct writes or ships: (where it comes from, the spec)."""
    own = [{"path": "/bin/true", "args": ["true"]}]
    yield (
        "sim bundles",
        config(["true"], {"LD_PRELOAD": "/evil.so"}, {"prestart": own, "createRuntime": own, "poststop": own}),
    )
    yield "sim bundles with an empty env", config(["true"], {}, {"prestart": [{**own[0], "env": []}]})
    yield "sim bundles with the hook of the node", config(["true"], {}, hooks_of(Path("/node")))
    yield "sim bundles with the hook itself", config(["true"], {}, {"prestart": [nvct_hook(Path("/node"))]})
    for path in sorted(TREE.joinpath("runtime-configs").rglob("*")):
        if path.suffix == ".json":
            yield str(path), json.loads(path.read_text())
        elif path.suffix in (".yaml", ".yml"):
            yield str(path), list(yaml.safe_load_all(path.read_text()))


def faults(spec: object) -> list[str]:
    found = []
    for stage, hook in hooks_in(spec):
        env = hook.get("env")
        if stage in IN_THE_CONTAINER:
            found.append(f"{stage} runs in the container")
        if not env:
            found.append(f"{stage} has no env")
        elif any(entry.startswith(("LD_", "PYTHON", "NVCT_")) or "=" not in entry for entry in env):
            found.append(f"{stage} has {env}")
    return found


def test_every_hook_that_is_emitted_has_an_env_and_runs_outside() -> None:
    specs = dict(emitted())
    assert {source: faults(spec) for source, spec in specs.items()} == dict.fromkeys(specs, [])
    assert sum(1 for spec in specs.values() for _ in hooks_in(spec)) >= 6


@pytest.mark.parametrize(
    "spec",
    [
        {"hooks": {"prestart": [{"path": "/x"}]}},
        {"hooks": {"prestart": [{"path": "/x", "env": []}]}},
        {"hooks": {"createContainer": [{"path": "/x", "env": ["A=1"]}]}},
        {"hooks": {"createRuntime": [{"path": "/x", "env": ["LD_PRELOAD=/evil.so"]}]}},
        {"devices": [{"containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/x", "env": ["A=1"]}]}}]},
        {"version": "1.0.0", "hook": {"path": "/x"}, "stages": ["prestart"]},
    ],
)
def test_a_fault_would_be_found(spec: object) -> None:
    assert len(faults(spec)) == 1


# What reads the specs of others, and writes none.
READERS = {TREE / "nvct/cdi/check.py"}


def test_no_code_names_a_stage_in_the_container() -> None:
    """What writes hooks one day must not write these."""
    named = {
        path for path in (TREE / "nvct").rglob("*.py") if any(stage in path.read_text() for stage in IN_THE_CONTAINER)
    }
    assert named == READERS


# The whole hook up to the injection, in a process of its own: which files its modules come from.
REPORT = """\
import os, sys
{path_entry}
from nvct.oci import give, hook
give.inject = lambda *_: ()
status = hook.main(["--config", {config!r}, "prestart"])
files = {{name: getattr(module, "__file__", None) for name, module in sys.modules.items()}}
print(repr((status, dict(os.environ), files)))
"""


def set_traps(folder: Path) -> None:
    """Modules under names that the hook imports, and nvct itself, each of which would end it."""
    (folder / "nvct").mkdir(parents=True)
    for name in ("json", "os", "re", "_json", "fcntl", "sitecustomize", "usercustomize", "startup", "nvct/__init__"):
        (folder / f"{name}.py").write_text("import posix; posix._exit(42)\n")


def hostile_env(evil: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(evil),
        "PYTHONHOME": str(evil),
        "PYTHONSTARTUP": f"{evil}/startup.py",
        "PYTHONUSERBASE": str(evil),
        "PYTHONINSPECT": "1",
        "PYTHONPLATLIBDIR": str(evil),
        "NVCT_CONFIG": f"{evil}/config.yaml",
        "NVIDIA_CTK_CONFIG_FILE_PATH": f"{evil}/config.toml",
        "XDG_CONFIG_HOME": str(evil),
        "HOME": str(evil),
        "PATH": str(evil),
        "NVIDIA_VISIBLE_DEVICES": "all",
    }


def state_of(container: MountNamespace, folder: Path) -> str:
    """The OCI state of a container of this process that asks for a GPU."""
    (folder / "rootfs").mkdir()
    spec = config(["true"], {"NVIDIA_VISIBLE_DEVICES": "2"}, {})
    spec["root"] = {"path": str(folder / "rootfs")}
    (folder / "config.json").write_text(json.dumps(spec))
    return json.dumps({"pid": container.pid, "bundle": str(folder)})


@pytest.mark.parametrize("inventory", ["none", "fresh"])
def test_modules_come_from_python_and_the_tree_only(dgx: SimNode, tmp_path: Path, inventory: str) -> None:
    evil = tmp_path / "evil"
    set_traps(evil)
    trap = subprocess.run([PYTHON, "-c", "import json"], env={"PYTHONPATH": str(evil)}, cwd=evil)
    assert trap.returncode == 42, "the trap does not work"
    if inventory == "none":
        dgx.forget()
    program = REPORT.format(path_entry=f"sys.path.append({str(TREE)!r})", config=str(dgx.config))
    with MountNamespace("true") as container:
        done = subprocess.run(
            [PYTHON, "-I", "-S", "-c", program],
            input=state_of(container, tmp_path), capture_output=True, text=True, cwd=evil, env=hostile_env(evil),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    status, env, files = literal_eval(done.stdout)
    assert (status, env) == (0, {})
    origins = {str(path).rpartition("/")[0] for path in files.values() if path}
    assert {origin for origin in origins if not origin.startswith(("/usr/lib/python3", f"{TREE}/nvct"))} == set()
    assert f"{TREE}/nvct/oci" in origins


def test_the_script_itself_takes_nothing_from_its_surroundings(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    set_traps(evil)
    done = subprocess.run([HOOK, "-version"], capture_output=True, text=True, cwd=evil, env=hostile_env(evil))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("NVIDIA Container Runtime Hook version")
