"""Arithmetic written out in steps so small that a five-layer model can take each one by itself.

Sums and differences go column by column from the right (`47+85: 7+5=12, 4+8+1=13`), so the carry is
on paper before it is needed; the answer is then read off the last digits of the steps, backwards.
Every step is a few one-digit tokens.
"""

STEP = ", "
RESTATED = ": "


def worked_sum(a: int, b: int) -> str:
    """`47+85: 7+5=12, 4+8+1=13`; both terms at least 1."""
    return f"{a}+{b}{RESTATED}" + STEP.join(column_steps(a, b))


def worked_difference(a: int, b: int) -> str:
    """`432-85: 12-5=7, 13-8-1=4, 4-1=3`: a borrowed ten is written before the digit; needs a >= b
    >= 1.
    """
    assert a >= b >= 1, (a, b)
    return f"{a}-{b}{RESTATED}" + STEP.join(_borrow_steps(a, b))


def worked_product(a: int, b: int) -> str:
    """By one digit `47*5: 7*5=35, 4*5+3=23`; by two, two rows and their sum `47*5=235, 47*8=376,
    5, 3+6=9, ...`.
    """
    a, b = max(a, b), min(a, b)
    if a < 10:
        return f"{a}*{b}={a * b}"
    if b < 10:
        return f"{a}*{b}{RESTATED}" + STEP.join(_row_steps(a, b))
    units, tens = a * (b % 10), a * (b // 10)
    rows = [f"{a}*{b % 10}={units}", f"{a}*{b // 10}={tens}"]
    return STEP.join([*rows, str(units % 10), *column_steps(units // 10, tens)])


def column_steps(a: int, b: int) -> list[str]:
    """One step a column from the right; where one number has run out only the other's digit (and
    the carry) stands.
    """
    steps, carry = [], 0
    while a or b:
        terms = [number % 10 for number in (a, b) if number] + [carry] * (carry > 0)
        steps.append(_equation("+", terms))
        carry = sum(terms) // 10
        a, b = a // 10, b // 10
    return steps


def _borrow_steps(a: int, b: int) -> list[str]:
    steps, borrow = [], 0
    while a:
        terms = [b % 10] * (b > 0) + [borrow] * (borrow > 0)
        borrow = int(a % 10 < sum(terms))
        steps.append(_equation("-", [10 * borrow + a % 10, *terms]))
        a, b = a // 10, b // 10
    return steps


def _row_steps(a: int, digit: int) -> list[str]:
    steps, carry = [], 0
    while a:
        product = a % 10 * digit + carry
        plus = f"+{carry}" if carry else ""
        steps.append(f"{a % 10}*{digit}{plus}={product}")
        a, carry = a // 10, product // 10
    return steps


def _equation(sign: str, terms: list[int]) -> str:
    """`7+5=12`, or `7` alone where there is nothing to compute."""
    if len(terms) == 1:
        return str(terms[0])
    result = sum(terms) if sign == "+" else terms[0] - sum(terms[1:])
    return f"{sign.join(map(str, terms))}={result}"
