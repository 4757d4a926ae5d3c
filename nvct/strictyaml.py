"""YAML of which nobody can read two things: PyYAML takes the last of two equal names, a reader perhaps the first."""

from __future__ import annotations

from typing import Any

from nvct.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import yaml


def strict_loader(base: type[Any], where: str) -> type[Any]:
    """One of PyYAML's safe loaders that refuses a mapping with two equal names.

    `where` begins its message, which it raises as ConfigError.
    """
    from yaml import ScalarNode  # slow, and who reads JSON alone needs none of it

    class Loader(base):  # type: ignore[misc]  # whichever PyYAML has been built with
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise ConfigError(
                            f"{where}, line {line}: `{shortened(key.value)}` is stated again, first in line "
                            f"{lines[key.value]}; keep one of the two"
                        )
                    lines[key.value] = line
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Loader


def shortened(text: str) -> str:
    """A name for a message, on one line."""
    shown = ascii(text)[1:-1]
    return shown if len(shown) <= 78 else shown[:75] + "..."
