"""`make fuzz`: each target under atheris, which looks for inputs that reach new code, for FUZZ_SECONDS (60).

usage: fuzz.py [TARGET ...]

What is found is printed, and kept as a file in tests/fuzz/found/: put its bytes into a test. Exit status 1 then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.fuzz.targets import TARGETS  # noqa: E402  # the path must come first

FOUND = HERE / "found"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        print(f"unknown target {unknown[0]!r}; there are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    FOUND.mkdir(exist_ok=True)
    seconds = os.environ.get("FUZZ_SECONDS", "60")
    bad = [name for name in names or TARGETS if not _survives(name, seconds)]
    print(f"found something in {', '.join(bad)}: see {FOUND}" if bad else "nothing found")
    return bool(bad)


def _survives(name: str, seconds: str) -> bool:
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(TARGETS[name].seeds):
            Path(corpus, str(number)).write_bytes(seed)
        print(f"{name}: {seconds} s", flush=True)
        options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=1024", "-verbosity=0"]
        options.append(f"-artifact_prefix={FOUND}/{name}-")
        # A process of its own: the fuzzer ends the one that it is in.
        return not subprocess.run([sys.executable, __file__, "--one", name, corpus, *options]).returncode


def _fuzz(name: str, arguments: list[str]) -> None:
    import atheris

    run = TARGETS[name].run
    atheris.instrument_all()
    atheris.Setup([__file__, *arguments], run)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main(sys.argv[1:]))
