"""The hook's front, a shell script: "no GPU" it says only where that is sure, and everything else is Python's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nvct.request import MOUNT_LIST, SWARM_PREFIX, request_from_env
from tests.support.runc import HOOK

SHELLS = {"dash": "/bin/dash", "bash": "/bin/bash", "busybox": "/bin/busybox"}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace shows what is started; it is not installed"),
]


class Front(NamedTuple):
    """What became of a start: whether Python was started, and what whoever called the hook sees."""

    python: bool
    status: int
    said: str


class Fronts:
    """Starts the hook by one shell, under the name of sh, as the script's first line has it."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.folder = folder
        self._shell = folder / "sh"
        self._shell.symlink_to(shell)

    def start(
        self, state: bytes | str | None, *arguments: str, env: dict[str, str] | None = None, hook: Path = HOOK
    ) -> Front:
        """`state` None is a standard input that is closed."""
        log = self.folder / "execve.log"
        command = [
            shutil.which("strace"),
            "-f",
            "--seccomp-bpf",
            "-e",
            "trace=execve",
            "-o",
            log,
            self._shell,
            hook,
            *(arguments or ("prestart",)),
        ]
        if state is None:
            command = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command]
        done = subprocess.run(
            command,
            input=state.encode() if isinstance(state, str) else state or b"",
            capture_output=True,
            env={"PATH": "/usr/bin:/bin", **(env or {})},
            timeout=60,
        )
        started = re.findall(r'execve\("([^"]*)"', log.read_text())
        assert {os.path.basename(path) for path in started} <= {"sh", "grep", "python3"}, started
        return Front("/usr/bin/python3" in started, done.returncode, (done.stdout + done.stderr).decode())


@pytest.fixture(params=SHELLS)
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Fronts:
    if not os.path.exists(SHELLS[request.param]):
        pytest.skip(f"{SHELLS[request.param]} is not on this machine")
    return Fronts(SHELLS[request.param], tmp_path)


def spec(*env: str, **more: Any) -> dict[str, Any]:
    process = {"args": ["sh"], "env": ["PATH=/usr/bin", *env]}
    return {"ociVersion": "1.0.2", "process": process, "root": {"path": "rootfs"}, **more}


def bundle(folder: Path, text: dict[str, Any] | str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


def state(folder: object, **more: Any) -> dict[str, Any]:
    """That of a container that is this process: for one that asks for a GPU the hook refuses to work on the host."""
    return {"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": os.getpid(), "bundle": str(folder), **more}


NO_GPU = Front(python=False, status=0, said="")
ON_THE_HOST = "has no mount namespace of its own"


def test_no_gpu_needs_no_python(front: Fronts) -> None:
    folder = bundle(front.folder / "b", spec("HOME=/root", annotations={"note": "a \\n b"}))
    compact = json.dumps(state(folder), separators=(",", ":"))
    assert front.start(compact) == NO_GPU
    assert front.start(compact + "\n") == NO_GPU
    assert front.start(json.dumps(state(folder, annotations={"key": ["{bundles}"]}))) == NO_GPU
    assert front.start(json.dumps(state(folder), indent=2)) == NO_GPU


@pytest.mark.parametrize(
    "name", ["two  blanks", "it's", "$(exit 3)`exit 4`", "*?[a]", "-e", "a{b}c", "größe", "a;b&c|d"]
)
def test_any_name_of_a_folder_is_only_a_name(front: Fronts, name: str) -> None:
    quiet, asking = bundle(front.folder / name, spec()), bundle(front.folder / f"{name}2", spec("NVIDIA_X=2"))
    assert front.start(json.dumps(state(quiet), ensure_ascii=False)) == NO_GPU
    assert front.start(json.dumps(state(asking), ensure_ascii=False)) == Front(True, 0, "")


@pytest.mark.parametrize(
    "text",
    [
        spec("NVIDIA_VISIBLE_DEVICES=all"),
        spec("CUDA_VERSION=9.0"),
        spec(mounts=[{"source": "/dev/null", "destination": f"{MOUNT_LIST}/0", "type": "bind"}]),
        json.dumps(spec("NVIDIA_VISIBLE_DEVICES=2")).replace("NVIDIA_", "NVIDIA\\u005f"),
        json.dumps(spec("CUDA_VERSION=9.0")).replace("CUDA", "\\u0043UDA"),
        json.dumps(spec("A=b", "NVIDIA_VISIBLE_DEVICES=2"), indent=1),
        json.dumps(spec("A=" + "x" * 300_000, "NVIDIA_VISIBLE_DEVICES=2")),
    ],
    ids=["devices", "old image", "mount list", "escaped name", "escaped letter", "lines", "long line"],
)
def test_whoever_asks_is_heard(front: Fronts, text: dict[str, Any] | str) -> None:
    started = front.start(json.dumps(state(bundle(front.folder / "b", text))))
    assert (started.python, started.status) == (True, 1)
    assert ON_THE_HOST in started.said


class Looks(dict[str, str]):
    """An environment that notes which variables are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return False


def test_the_script_knows_every_word_of_a_request() -> None:
    words = re.findall(r"-e '?([\w\\-]+)'?", HOOK.read_text())
    env = Looks()
    request_from_env(env)
    asked = {*env.names, SWARM_PREFIX, MOUNT_LIST, "NVIDIA_REQUIRE_"}
    assert len(env.names) > 6
    assert {name for name in asked if not any(word in name for word in words)} == set()
    assert "\\u" in words


def strange_states(good: Path, asking: Path) -> dict[str, tuple[str, str]]:
    """States about whose bundle the front must not be sure, and what Python says to them ("" is nothing)."""
    # `good` asks for nothing: were its config.json taken for the container's, the front would be wrong.
    inner = json.dumps({**state(asking), "annotations": {"bundle": str(good)}})
    before = json.dumps({"annotations": {"bundle": str(good)}, **state(asking)})
    escaped = json.dumps(state(asking)).replace('"bundle"', '"b\\u0075ndle"')
    return {
        "an annotation of that name": (inner, ON_THE_HOST),
        "such an annotation before": (before, ON_THE_HOST),
        "such an annotation and an escaped key": (escaped[:-1] + f', "x": {{"bundle": "{good}"}}}}', ON_THE_HOST),
        "only an inner one": (json.dumps({"pid": 1, "x": {"bundle": str(good)}}), "has pid 1 and bundle None"),
        "in a list": (json.dumps([{"bundle": str(good)}]), "is not a JSON object"),
        "an escape in the path": (json.dumps(state(asking)).replace("/", "\\/"), ON_THE_HOST),
        "an older name": (json.dumps({"pid": os.getpid(), "bundlePath": str(asking)}), ON_THE_HOST),
        "a relative path": (json.dumps(state("b")), "bundle 'b'"),
        "a number": ('{"pid": 1, "bundle": 7}', "bundle 7"),
        "no bundle": ('{"pid": 1}', "bundle None"),
        "a value of that name": ('{"pid": 1, "id": "bundle"}', "bundle None"),
        "nothing": ("", "is not JSON"),
        "half": (json.dumps(state(asking))[:-2].rpartition('"')[0], "is not JSON"),
        "no config.json": (json.dumps(state(asking.parent)), "No such file or directory"),
    }


@pytest.mark.parametrize("name", strange_states(Path("/g"), Path("/a")))
def test_what_is_not_sure_is_pythons(front: Fronts, name: str) -> None:
    good, asking = (
        bundle(front.folder / "good", spec()),
        bundle(front.folder / "asking", spec("NVIDIA_VISIBLE_DEVICES=2")),
    )
    text, expected = strange_states(good, asking)[name]
    started = front.start(text)
    assert (started.python, started.status) == (True, 1)
    assert expected in started.said
    assert started.said.count("\n") == 1


def test_a_closed_standard_input_is_a_failure(front: Fronts) -> None:
    started = front.start(None)
    assert (started.python, started.status) == (True, 1)
    assert started.said.count("\n") == 1 and "is not JSON" in started.said


def test_a_long_state_arrives_whole(front: Fronts) -> None:
    asking = bundle(front.folder / "b", spec("NVIDIA_VISIBLE_DEVICES=2"))
    started = front.start(json.dumps(state(asking, annotations={"long": "x" * 200_000}), indent=1))
    assert (started.python, started.status) == (True, 1)
    assert ON_THE_HOST in started.said


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to nowhere"])
def test_a_config_that_is_no_file(front: Fronts, kind: str) -> None:
    folder = front.folder / "b"
    folder.mkdir()
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "link to nowhere": lambda path: os.symlink("/nowhere", path)}[kind]
    make(folder / "config.json")
    started = front.start(json.dumps(state(folder)))
    assert (started.python, started.status) == (True, 1)
    assert str(folder / "config.json") in started.said


def test_a_huge_line_takes_little_memory(front: Fronts) -> None:
    folder = bundle(front.folder / "b", "")
    with (folder / "config.json").open("wb") as file:
        for _ in range(200):
            file.write(b"x" * (1 << 20))
    process = subprocess.Popen([front.folder / "sh", HOOK, "prestart"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stderr
    process.stdin.write(json.dumps(state(folder)).encode())
    process.stdin.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 1
    assert "is longer than 16777216 bytes" in said
    assert said.count("\n") == 1
    assert usage.ru_maxrss < 160 << 10


def hostile_env(evil: Path) -> dict[str, str]:
    """Everything by which an environment could have a word in a script; whatever of it runs leaves the folder `ran`."""
    evil.mkdir()
    trap = f"/bin/mkdir {evil}/ran"
    for name in ("grep", "python3", "read", "test"):
        (evil / name).write_text(f"#!/bin/sh\n{trap}\n")
        (evil / name).chmod(0o755)
    (evil / "rc").write_text(f"{trap}\n")
    builtins = ("read", "test", "ulimit", "exec", "unset", "export", "exit", "[")
    return {
        **{f"BASH_FUNC_{name}%%": f"() {{ {trap}; }}" for name in builtins},
        "PATH": str(evil),
        "IFS": "/b",
        "ENV": f"{evil}/rc",
        "BASH_ENV": f"{evil}/rc",
        "PS4": f"$({trap})",
        "CDPATH": str(evil),
        "GREP_OPTIONS": "-v",
        "TMPDIR": f"{evil}/nowhere",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(evil),
        "state": "x",
        "bundle": "/",
        "hook": f"import os; os.mkdir('{evil}/ran')",
    }


def test_the_environment_decides_nothing(front: Fronts) -> None:
    evil = front.folder / "evil"
    env = hostile_env(evil)
    quiet, asking = bundle(front.folder / "q", spec()), bundle(front.folder / "a", spec("NVIDIA_VISIBLE_DEVICES=2"))
    assert front.start(json.dumps(state(quiet)), env=env) == NO_GPU
    long = front.start(json.dumps(state(asking, annotations={"long": "x" * 200_000})), env=env)
    assert (long.python, long.status) == (True, 1)
    assert ON_THE_HOST in long.said
    assert not (evil / "ran").exists()


@pytest.mark.parametrize(
    "arguments",
    [("createRuntime",), ("-config", "/x y", "prestart"), ("--config", "/x", "createRuntime"), ("poststart",),
     ("poststop",), ("--config", "/x", "poststop")],
)  # fmt: skip
def test_ordinary_command_lines(front: Fronts, arguments: tuple[str, ...]) -> None:
    assert front.start(json.dumps(state(bundle(front.folder / "b", spec()))), *arguments) == NO_GPU


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("-version",), 0),
        (("-config=/x", "prestart"), 0),
        (("-debug", "prestart"), 0),
        (("poststart", "-config", "prestart"), 0),
        (("-configx", "/x", "prestart"), 2),
        (("prestart", "poststop"), 2),
        (("",), 2),
        (("start",), 2),
        (("-config", "/x", "a", "prestart"), 2),
        (("prestart",) * 11, 2),
    ],
)
def test_every_other_command_line_is_pythons(front: Fronts, arguments: tuple[str, ...], status: int) -> None:
    started = front.start(json.dumps(state(bundle(front.folder / "b", spec()))), *arguments)
    assert (started.python, started.status) == (True, status)


def test_it_is_found_through_links(front: Fronts) -> None:
    (front.folder / "bin").mkdir()
    one, two = front.folder / "bin" / HOOK.name, front.folder / HOOK.name
    one.symlink_to(os.path.relpath(HOOK, one.parent))
    two.symlink_to(f"bin/{HOOK.name}")
    started = front.start(b"", "-version", hook=two)
    assert (started.python, started.status) == (True, 0)
    assert started.said.startswith("NVIDIA Container Runtime Hook version")


def test_a_terminal_is_told_who_calls_this(front: Fronts) -> None:
    main, other = os.openpty()
    done = subprocess.run([front.folder / "sh", HOOK, "prestart"], stdin=other, capture_output=True, timeout=20)
    os.close(main)
    os.close(other)
    assert done.returncode == 1
    assert b"a container runtime calls this" in done.stderr
