"""NVIDIA_REQUIRE_*: conditions that an image puts on the driver and the GPU.

    expression  terms with spaces between them: it holds when one of them holds, or when there is none
    term        factors with commas between them: it holds when all of them hold
    factor      a fact (cuda, driver, arch, brand), one of = != < <= > >=, and a value

For example: cuda>=12.4 brand=tesla,driver>=470,driver<471. A factor about a fact that nobody knows holds.
"""

from __future__ import annotations

from nvct.record import record

_VERSIONS = ("cuda", "driver", "arch")
_NAMES = (*_VERSIONS, "brand")
_DIGITS = frozenset("0123456789")
_GRAMMAR = (
    "expected a fact (cuda, driver, arch or brand), one of = != < <= > >=, and a value; "
    "a comma means and, a space means or"
)


class Malformed(Exception):
    """A factor that says nothing. `text` is what was written, `reason` what is wrong with it and what was expected."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.text = text
        self.reason = reason


@record
class Factor:
    """One comparison: `name` is a fact, `operator` one of = != < <= > >=, `text` what was written."""

    name: str
    operator: str
    value: str
    text: str


@record
class Term:
    """Factors that must all hold; `text` is what was written."""

    factors: tuple[Factor, ...]
    text: str


@record
class Unmet:
    """A term that does not hold, and its first factor that does not. `fact` is the value that it was compared with."""

    term: Term
    factor: Factor
    fact: str


def parse(expression: str) -> tuple[Term, ...]:
    """The terms of an expression, in their order. Raises Malformed for what is no such expression."""
    terms = []
    for text in expression.split():
        factors = tuple(_factor(part) for part in text.split(",") if part)
        if factors:
            terms.append(Term(factors, text))
    return tuple(terms)


def unmet(terms: tuple[Term, ...], facts: dict[str, str]) -> tuple[Unmet, ...]:
    """Why each term does not hold, or () when the expression holds.

    `facts` has the values of cuda, driver, arch (compute capability) and brand; one that is absent, empty or, where a
    version is expected, none is unknown.
    """
    failures = []
    for term in terms:
        failed = [factor for factor in term.factors if not _holds(factor, facts.get(factor.name, ""))]
        if not failed:
            return ()
        failures.append(Unmet(term, failed[0], facts[failed[0].name]))
    return tuple(failures)


def _factor(text: str) -> Factor:
    signs = [place for place, char in enumerate(text) if char in "=!<>"]
    start = signs[0] if signs else len(text)
    end = len(text) - len(text[start:].lstrip("=!<>"))
    factor = Factor(text[:start].lower(), text[start:end], text[end:], text)
    if factor.operator not in ("=", "!=", "<", "<=", ">", ">=") or not factor.value:
        raise Malformed(text, f"compares nothing: {_GRAMMAR}")
    if factor.name not in _NAMES:
        raise Malformed(text, f"names no known fact: {_GRAMMAR}")
    if factor.name == "brand" and factor.operator not in ("=", "!="):
        raise Malformed(text, "puts brands in an order; they can only be compared by = and !=")
    if factor.name in _VERSIONS and _version(factor.value) is None:
        raise Malformed(text, "compares a version with something else; expected digits and dots: 12.4")
    return factor


def _holds(factor: Factor, fact: str) -> bool:
    if factor.name == "brand":
        same = factor.value.lower() == fact.lower()
        return not fact or same == (factor.operator == "=")
    found, wanted = _version(fact), _version(factor.value)
    if found is None or wanted is None:
        return True
    return {
        "=": found == wanted,
        "!=": found != wanted,
        "<": found < wanted,
        "<=": found <= wanted,
        ">": found > wanted,
        ">=": found >= wanted,
    }[factor.operator]


def _version(text: str) -> tuple[tuple[int, str], ...] | None:
    """A version in an order that compares its numbers, 11.0 being 11; None when `text` is no version.

    Numbers stay text, length first: Python refuses to make a number of thousands of digits, which anyone can write.
    """
    parts = text.split(".")
    if not _DIGITS.issuperset("".join(parts)) or not any(parts):
        return None
    numbers = [part.lstrip("0") for part in parts]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple((len(number), number) for number in numbers)
