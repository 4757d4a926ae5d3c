"""NVIDIA_REQUIRE_*: the grammar, and how values are compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct.requirements import Factor, Malformed, Unmet, parse, unmet

FACTS = {"cuda": "12.4", "driver": "550.163.01", "arch": "8.0", "brand": "Nvidia"}


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        ",",
        " , ,, ",
        "cuda=12.4",
        "cuda>=12.4",
        "cuda<=12.4",
        "cuda>=12",
        "cuda>=9.2",
        "cuda<12.10",
        "cuda!=12.3",
        "CUDA=12.4.0",
        "cuda=12.4.",
        "cuda=012.04",
        "cuda<12.4.1",
        "cuda>0",
        "driver>=550",
        "driver>99",
        "driver=550.163.1",
        "driver<551,driver>=550",
        "arch>=8.0",
        "arch=8",
        "brand=nvidia",
        "BRAND!=tesla",
        ",cuda>=12,,arch>=8,",
        "cuda>=13.0 brand=tesla,driver>=450,driver<451 brand=nvidia,driver>=550",
        "cuda>=13.0  cuda>=12",
        f"cuda<{'9' * 5000}",
    ],
)
def test_what_holds(expression: str) -> None:
    assert unmet(parse(expression), FACTS) == ()


@pytest.mark.parametrize(
    ("expression", "failing", "fact"),
    [
        ("cuda!=12.4", ["cuda!=12.4"], ["12.4"]),
        ("cuda>=13.0", ["cuda>=13.0"], ["12.4"]),
        ("cuda>12.4.0", ["cuda>12.4.0"], ["12.4"]),
        ("cuda>=12.10", ["cuda>=12.10"], ["12.4"]),
        ("cuda<9.2", ["cuda<9.2"], ["12.4"]),
        ("driver>=560", ["driver>=560"], ["550.163.01"]),
        ("driver<=99", ["driver<=99"], ["550.163.01"]),
        ("arch>=9.0", ["arch>=9.0"], ["8.0"]),
        ("brand=tesla", ["brand=tesla"], ["Nvidia"]),
        ("brand!=NVIDIA", ["brand!=NVIDIA"], ["Nvidia"]),
        ("cuda>=12,arch>=9,brand=x", ["arch>=9"], ["8.0"]),
        ("cuda>=13 brand=tesla,driver>=450", ["cuda>=13", "brand=tesla"], ["12.4", "Nvidia"]),
    ],
)
def test_what_does_not_hold_names_the_first_failing_factor_of_each_term(
    expression: str, failing: list[str], fact: list[str]
) -> None:
    failures = unmet(parse(expression), FACTS)
    assert [failure.factor.text for failure in failures] == failing
    assert [failure.fact for failure in failures] == fact
    assert [failure.term.text for failure in failures] == expression.split()


# B18: the demand of an image, by driver and brand.
@pytest.mark.parametrize(
    ("cuda", "driver", "brand", "holds"),
    [
        ("12.2", "535.54.03", "Tesla", True),
        ("12.2", "535.54.03", "GeForce", True),
        ("11.0", "450.80.02", "Tesla", True),
        ("11.0", "450.80.02", "GeForce", False),
        ("10.1", "418.40.04", "Tesla", False),
        ("11.4", "451.48", "Tesla", False),
    ],
)
def test_the_demand_of_a_published_image(cuda: str, driver: str, brand: str, holds: bool) -> None:
    terms = parse("cuda>=11.8 brand=tesla,driver>=450,driver<451")
    assert (unmet(terms, {"cuda": cuda, "driver": driver, "brand": brand, "arch": "7.0"}) == ()) is holds


@pytest.mark.parametrize("facts", [{}, dict.fromkeys(FACTS, ""), {"cuda": "n/a", "driver": "r550", "arch": "."}])
def test_a_fact_that_nobody_knows_holds(facts: dict[str, str]) -> None:
    assert unmet(parse("cuda>=99,driver<1,arch=3,brand=x"), facts) == ()
    assert unmet(parse("brand!=x"), facts) == ()


@pytest.mark.parametrize(
    ("expression", "text", "reason"),
    [
        ("bogus>=1", "bogus>=1", "names no known fact"),
        (">=1", ">=1", "names no known fact"),
        ("cuda>=12.0 bogus>=1", "bogus>=1", "names no known fact"),
        ("cuda", "cuda", "compares nothing"),
        ("cuda>=", "cuda>=", "compares nothing"),
        ("cuda!1", "cuda!1", "compares nothing"),
        ("cuda>=12,arch", "arch", "compares nothing"),
        ("cuda>=x", "cuda>=x", "expected digits and dots"),
        ("cuda>>1", "cuda>>1", "compares nothing"),
        ("cuda==1", "cuda==1", "compares nothing"),
        ("cuda=>1", "cuda=>1", "one of = != < <= > >="),
        ("cuda>=1.x", "cuda>=1.x", "expected digits and dots"),
        ("cuda>=.", "cuda>=.", "expected digits and dots"),
        ("cuda>=-1", "cuda>=-1", "expected digits and dots"),
        ("cuda>=١", "cuda>=١", "expected digits and dots"),
        ("brand>tesla", "brand>tesla", "brands in an order"),
    ],
)
def test_what_is_malformed_is_said(expression: str, text: str, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        parse(expression)
    assert malformed.value.text == text
    assert reason in malformed.value.reason


def test_a_factor_is_taken_apart() -> None:
    (term,) = parse("Driver>=470,brand=Tesla")
    assert term.text == "Driver>=470,brand=Tesla"
    assert term.factors == (
        Factor("driver", ">=", "470", "Driver>=470"),
        Factor("brand", "=", "Tesla", "brand=Tesla"),
    )


EXPRESSION = st.text(alphabet="cudagrivebnh=!<>,. 0123456789\n", max_size=40)
NUMBERS = st.lists(st.integers(0, 1000), min_size=1, max_size=4)


@given(EXPRESSION | st.text())
def test_any_text_is_parsed_or_malformed(expression: str) -> None:
    try:
        failures = unmet(parse(expression), FACTS)
    except Malformed as malformed:
        assert malformed.text in expression
    else:
        assert all(isinstance(failure, Unmet) for failure in failures)


def dotted(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))


@given(NUMBERS, NUMBERS)
def test_versions_are_in_the_order_of_their_numbers(found: list[int], wanted: list[int]) -> None:
    width = max(len(found), len(wanted))
    left, right = ([*numbers, *[0] * (width - len(numbers))] for numbers in (found, wanted))
    expected = {"=": left == right, "!=": left != right, "<": left < right, ">": left > right}
    expected |= {"<=": left <= right, ">=": left >= right}
    for operator, holds in expected.items():
        terms = parse(f"driver{operator}{dotted(wanted)}")
        assert (unmet(terms, {"driver": dotted(found)}) == ()) is holds
