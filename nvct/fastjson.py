"""JSON text to values and back without the `json` package, which takes longer to import than a hook may take.

The C scanner behind `json.loads` stands alone in `_json`, as does the encoder behind `json.dumps`; the one needs an
object that holds the parsing choices, the other has them as arguments.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_encoder, make_scanner

_BLANKS = " \t\n\r"


class _Choices:
    strict = False  # runtimes have been seen to write raw control characters into env values
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}


_scan = make_scanner(_Choices())  # type: ignore[arg-type]  # typeshed knows only the scanner itself


def loads(text: str) -> object:
    """The one JSON value in `text`. Raises ValueError where `json.loads` does."""
    start = len(text) - len(text.lstrip(_BLANKS))
    try:
        value, end = _scan(text, start)
    except StopIteration as stop:
        raise ValueError(f"no JSON value at character {stop.value}") from None
    except SystemError:  # the scanner looks for its exception in `json.decoder`, and finds that it was never imported
        raise ValueError("not JSON, or cut short") from None
    if text[end:].strip(_BLANKS):
        raise ValueError(f"more text after the JSON value, at character {end}")
    return value


def dumps(value: object) -> str:
    """The value as JSON text on one line, all of it ASCII. Raises TypeError for what JSON has no words for, ValueError
    for a number that is none or has no end: `loads` makes infinity of 1e400.
    """
    return "".join(_encode(value, 0))


def _refuse(value: object) -> object:
    raise TypeError(f"JSON has no {type(value).__name__}")


_encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, False)
