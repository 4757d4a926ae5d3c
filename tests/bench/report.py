"""The benchmark's figures as a table, and README's section "What it costs", which is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runc import TREE

RESULTS = Path(__file__).with_name("results.json")
README = TREE / "README.md"

# README's section: from its heading to the next one.
HEADING, NEXT = "## What it costs\n", "\n## "

SECTION = """
`make bench` measures nvct when the inventory is fresh. First the hook: its process alone, on a container of its own
each time{real_time}, and what it adds to `runc run`. All runs are in one random rotation, with the containers' files
on a tmpfs. The unit is the time that Python takes to start and do nothing, `python3 -I -S -c pass`: here
{yardstick:.1f} ms, and {ordinary:.1f} ms at the containers' priority. `runc run` without a hook takes {runc:.0f} ms.
Medians of at least {runs} runs on {machine}; load average {load:.1f}:

{cases}
{why_hook}
NVML is asked once, when the node has changed since the inventory was made. A container that asks for no GPU is
recognised by a shell script, and no Python is started.{left_out}

### The other carriers

The same run measures the runtime, by what it adds to the same command of runc, and commands of `nvct`, by the whole
process. `state` stands for every command but `create` and `run`; `runc create` alone takes {create:.0f} ms for a
container that asks for no GPU. Medians of at least {other_runs} runs:

{others}
{why_create}"""

# Each is said where a goal is missed. What they name is in the order of a profile's shares.
WHY_HOOK = """
The goals of {missed} are missed: a shell and grep ({front:.1f} ms), an empty Python ({empty:.1f} ms) and its
`import os` ({os:.1f} ms) have taken {floor:.1f} yardsticks before any Python of nvct's runs, and the rest goes into its
code, which is checked for who can have written it and loaded, into the container's mounts, device nodes and loader
cache, which take the most where there are many, and into the inventory, which is read and compared with the node.
"""
WHY_CREATE = """
The goals of `create` are missed because Python is started twice, to edit the spec and then, in a small hook, to make
links and the loader cache; the rest is what runc itself takes for the mounts and device nodes that are in the spec now.
"""


def case_rows(results: dict[str, Any]) -> list[list[str]]:
    """A heading, then a row for every case of the hook."""
    lines = [["Container", "Hook, ms", "x Python", "Goal", "Peak, MiB", "Added to `runc run`, ms", "x Python"]]
    for key, case in results["cases"].items():
        lines.append(
            [
                f"{key}: {case['title']}",
                f"{case['hook_s'] * 1000:.1f}",
                f"{case['hook_ratio']:.2f}",
                f"{case['goal_ratio']:.1f}",
                f"{case['peak_kib'] / 1024:.1f}",
                f"{case['added_s'] * 1000:.1f}",
                f"{case['added_ratio']:.2f}",
            ]
        )
    return lines


def other_rows(results: dict[str, Any]) -> list[list[str]]:
    """A heading, then a row for every other carrier."""
    lines = [["Command", "ms", "x Python", "Goal"]]
    for other in results["others"].values():
        lines.append(
            [
                other["title"],
                f"{other['counted_s'] * 1000:.1f}",
                f"{other['ratio']:.2f}",
                "" if other["goal_ratio"] is None else f"{other['goal_ratio']:.1f}",
            ]
        )
    return lines


def text_tables(results: dict[str, Any]) -> str:
    """For a terminal."""
    unit = f"python3 -I -S -c pass: {results['yardstick_s'] * 1000:.1f} ms; runc run: {results['runc_s'] * 1000:.1f} ms"
    return "\n".join((*_columns(case_rows(results)), "", *_columns(other_rows(results)), "", unit))


def _columns(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(_padded(cell, width, at) for at, (cell, width) in enumerate(zip(line, widths))) for line in lines]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def readme_section(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return SECTION.format(
        yardstick=results["yardstick_s"] * 1000,
        ordinary=results["ordinary_yardstick_s"] * 1000,
        runc=results["runc_s"] * 1000,
        load=results["load"],
        real_time=" and at real-time priority" if results["real_time"] else "",
        runs=_fewest_runs(results["cases"]),
        machine=f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}",
        cases=_markdown(case_rows(results)),
        why_hook=_why_hook(results),
        left_out="" if results["device_cgroup"] == "v1" else " The hook alone was measured without a device cgroup.",
        create=results["create_s"] * 1000,
        other_runs=_fewest_runs(results["others"]),
        others=_markdown(other_rows(results)),
        why_create=_why_create(results),
    )


def _fewest_runs(figures: dict[str, Any]) -> int:
    return int(min(each["runs"] for each in figures.values()))


def _markdown(lines: list[list[str]]) -> str:
    heading, *others = lines
    ruler = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, ruler, *others))


def _why_hook(results: dict[str, Any]) -> str:
    missed = [key for key, case in results["cases"].items() if case["hook_ratio"] > case["goal_ratio"]]
    if not missed:
        return ""
    front, empty, os = results["cases"]["a"]["hook_s"], results["yardstick_s"], results["import_os_s"]
    return WHY_HOOK.format(
        missed=", ".join(missed),
        front=front * 1000,
        empty=empty * 1000,
        os=os * 1000,
        floor=(front + empty + os) / empty,
    )


def _why_create(results: dict[str, Any]) -> str:
    creations = [other for key, other in results["others"].items() if key.startswith("create-")]
    return WHY_CREATE if any(each["goal_ratio"] and each["ratio"] > each["goal_ratio"] for each in creations) else ""


def update_readme(results: dict[str, Any]) -> None:
    before, heading, rest = README.read_text().partition(HEADING)
    _, mark, after = rest.partition(NEXT)
    README.write_text(before + heading + readme_section(results) + mark + after)


def in_readme() -> str:
    """What README says there now."""
    return README.read_text().partition(HEADING)[2].partition(NEXT)[0]
