"""The hook's modules out of one file: to find and open fifty of them one by one takes as long as to start Python.

The file is `nvct/__pycache__/hook.<tag>.code`, and holds what the compiled files beside it hold, with the version of every
source that was looked at (`trust.why_code_is_unsafe`). One that is absent, damaged, of another version, or somebody else's
changes nothing but the time: then the modules are imported as usual, and the file is written for the next start.
"""

from __future__ import annotations

import marshal
import os
import sys
from _frozen_importlib_external import MAGIC_NUMBER  # importlib takes long

from nvct.trust import why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    # Name, file, whether it is a package, and code.
    Module = tuple[str, str, bool, CodeType]


def load(tree: str, versions: list[tuple[str, int, int, int]]) -> None:
    """Have all modules of the hook loaded. `versions` is what `why_code_is_unsafe` has seen in `tree`."""
    path = f"{tree}/nvct/__pycache__/hook.{sys.implementation.cache_tag}.code"
    modules = _read(path, versions)
    if modules is not None:
        _run(modules)
        return
    import nvct.oci.give
    import nvct.oci.hook  # noqa: F401

    try:
        _write(path, versions)
    except OSError:
        pass  # a tree that cannot be written to costs every start the time, and nothing else


def _read(path: str, versions: list[tuple[str, int, int, int]]) -> list[Module] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if why_unsafe(path, status):
            return None
        content = os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    try:
        magic, found, modules = marshal.loads(content)
    except (ValueError, EOFError, TypeError):
        return None
    return modules if (magic, found) == (MAGIC_NUMBER, versions) else None


def _run(modules: list[Module]) -> None:
    """Run the modules in the order in which they were complete, so that each finds what it imports."""
    kind = type(sys)
    for name, file, is_package, _ in modules:
        module = kind(name)
        module.__file__ = file
        if is_package:
            module.__path__ = [os.path.dirname(file)]
        sys.modules[name] = module
    for name, _, _, code in modules:
        module = sys.modules[name]
        exec(code, module.__dict__)
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)


def _write(path: str, versions: list[tuple[str, int, int, int]]) -> None:
    # sys.modules has them in the order in which they were complete: importlib moves each to the end then.
    modules = [_module(name) for name in sys.modules if name.startswith("nvct.") and name not in _LOADED_BEFORE]
    content = marshal.dumps((MAGIC_NUMBER, versions, modules))
    beside = f"{path}.{os.getpid()}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, content)
        os.close(descriptor)
        if written == len(content):
            os.rename(beside, path)
    finally:
        if os.path.lexists(beside):
            os.unlink(beside)


_LOADED_BEFORE = ("nvct.trust", __name__)


def _module(name: str) -> Module:
    module = sys.modules[name]
    loader = module.__spec__.loader  # type: ignore[union-attr]
    return name, str(module.__file__), hasattr(module, "__path__"), loader.get_code(name)  # type: ignore[union-attr]
