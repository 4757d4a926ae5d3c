"""The front of the runtime under every shell: what reaches the low-level runtime, and that it is as it came."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvct.oci import lowlevel, runtime
from nvct.settings import Settings
from nvct.sim.bundle import config
from tests.support.runc import HOOK, RUNTIME

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "ash"]}

# Stands in for runc: writes what it was started with.
REPORT = """\
#!/usr/bin/python3 -IS
import json, os, sys
def target(number):
    try:
        return os.readlink(f"/proc/self/fd/{{number}}")
    except OSError:
        return ""
environ = open("/proc/self/environ", "rb").read().decode("latin-1").split("\\0")[:-1]
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
mask = os.umask(0)
report = dict(args=sys.argv, env=environ, cwd=os.getcwd(), umask=mask, ignored=status["SigIgn"].strip(),
              blocked=status["SigBlk"].strip(), files=[target(n) for n in range(64)], text=sys.stdin.read())
open({report!r}, "w").write(json.dumps(report))
sys.exit(7)
"""

# What shells put into the environment, whatever they find there.
SHELLS_OWN = ("PWD=", "OLDPWD=", "SHLVL=", "_=", "IFS=")


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    command = SHELLS[request.param]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    return command


class Front:
    """The front with settings and a low-level runtime of its own, in a folder whose name is awkward."""

    def __init__(self, folder: Path, shell: Sequence[str] = ()) -> None:
        self.folder = folder / "a folder's $(x)"
        self.folder.mkdir()
        self.low = self.folder / "runc"
        self.report = self.folder / "report.json"
        self.low.write_text(REPORT.format(report=str(self.report)))
        self.low.chmod(0o755)
        self.settings = self.folder / "config.yaml"
        self.choice = self.folder / "low-level-runtime"
        self.choice.symlink_to(self.low)
        self._shell = shell

    def start(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [*self._shell, str(RUNTIME), "--nvct-config", str(self.settings), *arguments]
        options = {"input": "", "preexec_fn": usual_signals, **options}
        return subprocess.run(command, capture_output=True, text=True, **options)

    def told(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """What the low-level runtime was started with."""
        self.report.unlink(missing_ok=True)
        done = self.start(*arguments, **options)
        assert (done.returncode, done.stderr) == (7, "")
        report: dict[str, Any] = json.loads(self.report.read_text())
        return report

    def bundle(self, env: dict[str, str]) -> Path:
        folder = self.folder / "bundle"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(["true"], env, {})))
        return folder


# All signals but the two that the C library keeps to itself, which nobody here can set.
SIGNALS = sum(1 << number - 1 for number in signal.valid_signals())


def usual_signals() -> None:
    """Whatever the tests themselves were started with: a shell's background job ignores SIGINT, for one."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def front(tmp_path: Path, shell: list[str]) -> Front:
    return Front(tmp_path, shell)


COMMANDS = [
    ("state", "name"),
    ("--root", "/run/a b", "--log", "/l", "kill", "na'me", "KILL"),
    ("exec", "name", "sh", "-c", 'echo "$HOME" * \\\n', ""),
    ("delete", "--force", "-n", "name"),
    (),
    ("exec", "name", "create"),  # Python looks at this one, and finds that it is another command
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=range(len(COMMANDS)))
def test_every_other_command_arrives_as_it_was_given(front: Front, arguments: tuple[str, ...]) -> None:
    assert front.told(*arguments, input="text")["args"] == [str(front.choice), *arguments]


@pytest.mark.parametrize("command", ["create", "run"])
def test_so_does_the_creation_of_a_container_that_asks_for_nothing(front: Front, command: str) -> None:
    bundle = front.bundle({"NVIDIA_VISIBLE_DEVICES": "void"})
    text = (bundle / "config.json").read_bytes()
    arguments = ("--log", "/dev/null", command, "--bundle", str(bundle), "name")
    assert front.told(*arguments)["args"] == [str(front.choice), *arguments]
    assert (bundle / "config.json").read_bytes() == text
    assert os.listdir(bundle) == ["config.json"]


HOSTILE = {
    "PATH": "/nowhere",
    "IFS": "/n",
    "ENV": "/nowhere/env",
    "BASH_ENV": "/nowhere/env",
    "CDPATH": "/",
    "name": "x",
    "low": "/bin/false",
    "settings": "/nowhere",
    "PYTHONPATH": "/nowhere",
    "PYTHONHOME": "/nowhere",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "LINES": "two\nlines",
    "EMPTY": "",
    "_LIBCONTAINER": "1",
    "LISTEN_FDS": "2",
}


@pytest.mark.parametrize("command", ["state", "create"])
@pytest.mark.parametrize("env", [{}, HOSTILE], ids=["empty", "hostile"])
def test_the_environment_decides_nothing_and_arrives_as_it_was(front: Front, command: str, env: dict[str, str]) -> None:
    bundle = front.bundle({})
    shell = shutil.which(front._shell[0])
    front._shell = [str(shell), *front._shell[1:]]
    found = front.told(command, "--bundle", str(bundle), "name", env=env)["env"]
    # busybox gives a process without a PATH its own.
    own = SHELLS_OWN if "PATH" in env else (*SHELLS_OWN, "PATH=")
    wanted = [f"{name}={value}" for name, value in env.items()]
    assert sorted(entry for entry in found if not entry.startswith(own)) == sorted(
        entry for entry in wanted if not entry.startswith(own)
    )


@pytest.mark.parametrize("command", ["state", "create"])
def test_descriptors_signals_folder_and_mask_arrive_as_they_were(front: Front, command: str, tmp_path: Path) -> None:
    bundle = front.bundle({})

    def prepare() -> None:
        usual_signals()
        os.umask(0o027)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        told = front.told(
            command, "--bundle", str(bundle), "name", input="text", cwd=tmp_path, preexec_fn=prepare,
            pass_fds=(file.fileno(),),
        )  # fmt: skip
        assert told["files"][file.fileno()] == file.name
    assert told["text"] == "text"
    assert told["cwd"] == str(tmp_path)
    assert told["umask"] == 0o027
    # The report's own interpreter ignores SIGPIPE and SIGXFSZ.
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert int(told["ignored"], 16) & SIGNALS == own | 1 << signal.SIGHUP - 1
    assert int(told["blocked"], 16) == 0


def test_python_hands_on_no_signal_that_it_ignores(front: Front) -> None:
    front.low.write_text('#!/bin/sh\nwhile read -r line; do case $line in SigIgn*) echo "$line";; esac; done <$1\n')
    front.low.chmod(0o755)
    bundle = front.bundle({})
    done = front.start("/proc/self/status", "create", "--bundle", str(bundle), "name")
    name, ignored = done.stdout.split()
    assert (name, int(ignored, 16) & SIGNALS) == ("SigIgn:", 0)


def test_closed_standard_descriptors_stay_closed(front: Front) -> None:
    bundle = front.bundle({})
    command = [*front._shell, str(RUNTIME), "--nvct-config", str(front.settings), "create", "--bundle", str(bundle)]
    subprocess.run(["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *command], stdout=subprocess.PIPE)
    report = Path(f"{front.report}")
    assert not report.exists() or json.loads(report.read_text())["files"][2] in ("", "/dev/null")


@pytest.fixture
def traced(front: Front, tmp_path: Path) -> Callable[..., str]:
    """Starts the front with arguments: the programs and processes that it started on its way to the low-level one."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    front.low.write_text("#!/bin/sh\n")
    shell = front._shell

    def start(*arguments: str, **options: Any) -> str:
        trace = tmp_path / "trace"
        front._shell = [
            "strace",
            "-f",
            "--seccomp-bpf",
            "-o",
            str(trace),
            "-e",
            "trace=execve,fork,vfork,clone",
            *shell,
        ]
        done = front.start(*arguments, **options)
        assert (done.returncode, done.stderr) == (0, "")
        return trace.read_text()

    return start


def test_other_commands_start_no_python(traced: Callable[..., str]) -> None:
    calls = traced("state", "name")
    assert "python" not in calls
    assert re.findall(r"fork|clone", calls) == []


WORDS = ["NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "DOCKER_RESOURCE_GPU"]


def in_bundle(bundle: Path) -> list[tuple[str, ...]]:
    return [
        ("create", "--bundle", str(bundle), "name"),
        ("run", f"--bundle={bundle}", "name"),
        ("--log", "/dev/null", "create", "-b", str(bundle), "name"),
        ("--log-format=json", "--root", "/r", "create", "--bundle", str(bundle), "--pid-file", "/p", "name"),
    ]


def test_a_container_that_asks_for_nothing_starts_no_python(front: Front, traced: Callable[..., str]) -> None:
    bundle = front.bundle({"A": "b"})
    for arguments in in_bundle(bundle):
        assert "python" not in traced(*arguments)
    assert "python" not in traced("create", "name", cwd=bundle)


@pytest.mark.parametrize("word", [*WORDS, "annotation", "mount", "escaped"])
def test_python_decides_about_every_word_by_which_devices_are_asked_for(
    front: Front, traced: Callable[..., str], word: str
) -> None:
    bundle = front.bundle({word: ""} if word in WORDS else {})
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    if word == "annotation":
        spec["annotations"] = {"cdi.k8s.io/x": ""}
    elif word == "mount":
        spec["mounts"].append({"source": "/dev/zero", "destination": "/var/run/nvidia-container-devices/0"})
    elif word == "escaped":
        spec["process"]["env"].append("A=ü")
    path.write_text(json.dumps(spec))
    for arguments in in_bundle(bundle):
        assert "python" in traced(*arguments)
    assert "python" in traced("create", "name", cwd=bundle)


def test_python_decides_where_the_bundle_is_not_plain(front: Front, traced: Callable[..., str]) -> None:
    bundle = front.bundle({})
    plain = ("--bundle", str(bundle), "name")
    assert "python" in traced("create", "--bundle", "/nowhere", *plain)
    assert "python" in traced("create", "--config", "config.json", *plain)
    assert "python" in traced("create", "--bundle", str(bundle), "--", "name")
    assert "python" in traced("create", "-bundle", str(bundle), "name")
    assert "python" in traced("create", f"-b={bundle}", "name")
    assert "python" in traced("create", "--new-option", *plain)
    (bundle / "nvct-changes.json").write_text('{"changes": []}')
    assert "python" in traced("create", *plain)


def asking_bundle(front: Front) -> Path:
    """A bundle whose container asks for a GPU and has a shape that is refused, so that it shows whether it was read."""
    bundle = front.bundle({"NVIDIA_VISIBLE_DEVICES": "0"})
    spec = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**spec, "linux": "x"}))
    return bundle


def test_an_option_that_looks_like_the_value_of_another_hides_no_request(front: Front) -> None:
    done = front.start("--log", "--bundle", "create", "c1", cwd=asking_bundle(front))
    assert (done.returncode, done.stderr) == (
        1,
        "nvct: `linux` in config.json is 'x'; expected an object, as `runc spec` writes it\n",
    )


@pytest.mark.parametrize("form", ["-b{}", "-db{}", "--bund={}", "--bu={}"])
def test_crun_is_understood_and_for_runc_the_form_is_refused(front: Front, form: str) -> None:
    arguments = ("run", form.format(asking_bundle(front)), "c1")
    done = front.start(*arguments)
    assert done.returncode == 1
    assert re.fullmatch(r"nvct: .* is no option of runc's; .*\n", done.stderr)
    crun = front.low.rename(front.folder / "crun")
    front.choice.unlink()
    front.choice.symlink_to(crun)
    assert "`linux` in config.json is 'x'" in front.start(*arguments).stderr
    assert not front.report.exists()


def test_front_and_python_know_the_same_options() -> None:
    text = RUNTIME.read_text()
    alone = re.findall(r"(--[a-z-]+)(?= \||\) _nvct_option=other)", "\n".join(re.findall(r".*option=other ;;", text)))
    joined = re.findall(r"(--[a-z-]+)=\*", text)
    names = {f"--{name}" for name in (*runtime.GLOBAL_VALUES, *runtime.VALUES) if len(name) > 1} - {"--config"}
    assert {*alone, "--bundle"} == names
    assert set(joined) == names


def test_both_fronts_look_for_the_same_words() -> None:
    commands = [re.search(r"grep -qF (.*?)\n", program.read_text()) for program in (RUNTIME, HOOK)]
    words = [set(re.findall(r"-e (\S+)", command[1] if command else "")) for command in commands]
    assert words[0] == words[1]
    assert len(words[0]) == 6


@pytest.mark.parametrize("choice", ["/nowhere/runc", str(RUNTIME)])
def test_without_a_low_level_runtime_it_says_so(front: Front, choice: str) -> None:
    front.choice.unlink()
    front.choice.symlink_to(choice)
    done = front.start("state", "name")
    assert done.returncode == 1
    assert done.stderr.startswith(f"nvct: no low-level runtime: {front.choice}; ")
    assert done.stderr.count("\n") == 1
    assert "nvct refresh" in done.stderr


@pytest.mark.parametrize("kind", ["file", "folder", "link in a folder like /tmp"])
def test_a_choice_that_others_could_have_made_is_refused(front: Front, kind: str) -> None:
    if kind == "link in a folder like /tmp":
        front.folder.chmod(0o1777)
    else:
        front.choice.unlink()
        front.choice.mkdir() if kind == "folder" else front.choice.write_text(f"{front.low}\n")
    for command in ("state", "create"):
        done = front.start(command, "name")
        assert done.returncode == 1
        assert done.stderr.startswith(f"nvct: {front.choice} is not trusted: expected a link")
        assert done.stderr.count("\n") == 1
    assert not front.report.exists()


def test_a_folder_like_tmp_without_a_choice_will_do(front: Front) -> None:
    front.folder.chmod(0o1777)
    front.choice.unlink()
    done = front.start("--version")
    assert "not trusted" not in done.stderr


def test_settings_named_without_a_folder_have_the_choice_beside_them(front: Front) -> None:
    command = [*front._shell, str(RUNTIME), "--nvct-config", "config.yaml", "state", "name"]
    assert subprocess.run(command, input=b"", cwd=front.folder).returncode == 7


def test_without_a_choice_it_is_the_first_that_there_is(front: Front) -> None:
    front.choice.unlink()
    wanted = lowlevel.find(Settings().runtimes)
    if not wanted:
        pytest.skip("neither runc nor crun is installed")
    said = subprocess.run([wanted, "--version"], capture_output=True, text=True)
    done = front.start("--version")
    assert (done.returncode, done.stdout) == (0, said.stdout)


def test_it_works_through_links(front: Front) -> None:
    link = front.folder / "nvidia-container-runtime"
    link.symlink_to(RUNTIME)
    bundle = front.bundle({})
    arguments = ["create", "--bundle", str(bundle), "name"]
    done = subprocess.run([*front._shell, str(link), "--nvct-config", str(front.settings), *arguments], input=b"")
    assert done.returncode == 7
    assert json.loads(front.report.read_text())["args"] == [str(front.choice), *arguments]


def test_a_failure_stops_the_creation(front: Front) -> None:
    bundle = front.bundle({})
    (bundle / "config.json").write_text('{"NVIDIA_')
    log = front.folder / "log"
    done = front.start("--log", str(log), "--log-format", "json", "create", "--bundle", str(bundle), "name")
    assert done.returncode == 1
    assert re.fullmatch(r"nvct: .*config.json is not JSON: .*\n", done.stderr)
    (row,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (row["level"], row["msg"] + "\n") == ("error", done.stderr)
    assert not front.report.exists()


def test_front_and_settings_look_in_the_same_places() -> None:
    text = RUNTIME.read_text()
    assert f"for _nvct_name in {' '.join(lowlevel.NAMES)}; do" in text
    assert f"for _nvct_folder in {' '.join(lowlevel.FOLDERS)}; do" in text
    assert Settings().runtimes == lowlevel.NAMES
