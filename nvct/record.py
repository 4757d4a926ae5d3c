"""Small immutable values for the hot path.

`dataclasses` costs 14 ms to import, twice the start of the interpreter that runs the hook, so the nouns of nvct are
built by this decorator: the annotated names of a class become slots, constructor arguments, equality, hash and repr.
`record.pyi` tells type checkers the same.
"""

from __future__ import annotations

_REQUIRED = object()


def record(cls):
    """Turn an annotated class into an immutable value; an attribute set in the class body is that field's default."""
    names = tuple(cls.__annotations__)
    defaults = tuple(cls.__dict__.get(name, _REQUIRED) for name in names)
    body = {key: value for key, value in cls.__dict__.items() if key not in names}
    for name in ("__dict__", "__weakref__"):
        body.pop(name, None)
    body.update(__slots__=names, _fields=names, _defaults=defaults)
    return type(cls.__name__, (_Record,), body)


class _Record:
    __slots__ = ()
    _fields: tuple = ()
    _defaults: tuple = ()

    def __init__(self, *values, **named):
        put = object.__setattr__
        for name, value in zip(self._fields, values):
            put(self, name, value)
        if len(values) > len(self._fields):
            raise TypeError(f"{type(self).__name__} takes {len(self._fields)} values, got {len(values)}")
        rest = self._fields[len(values) :]
        for name, default in zip(rest, self._defaults[len(values) :]):
            value = named.pop(name, default)
            if value is _REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {name!r}")
            put(self, name, value)
        if named:
            raise TypeError(f"{type(self).__name__} has no field {sorted(named)[0]!r}, or got it twice")

    def __setattr__(self, name, value):
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name):
        raise AttributeError(f"{type(self).__name__} is immutable")

    def _values(self):
        return tuple(getattr(self, name) for name in self._fields)

    def __eq__(self, other):
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self):
        return hash((type(self), self._values()))

    def __repr__(self):
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({fields})"

    def __reduce__(self):
        return type(self), self._values()


def replace(value, **changes):
    """A copy of the record with some fields changed."""
    fields = {name: getattr(value, name) for name in value._fields}
    fields.update(changes)
    return type(value)(**fields)


def as_dict(value):
    """The record as plain dicts, lists and scalars, ready for JSON: nested records become dicts, tuples lists."""
    if isinstance(value, _Record):
        return {name: as_dict(getattr(value, name)) for name in value._fields}
    if isinstance(value, (tuple, list)):
        return [as_dict(item) for item in value]
    if isinstance(value, dict):
        return {key: as_dict(item) for key, item in value.items()}
    return value
