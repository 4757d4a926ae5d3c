from typing import Any, TypeVar

from typing_extensions import dataclass_transform

_T = TypeVar("_T")

@dataclass_transform(frozen_default=True)
def record(cls: type[_T]) -> type[_T]: ...
def replace(value: _T, **changes: Any) -> _T: ...
def as_dict(value: object) -> Any: ...
