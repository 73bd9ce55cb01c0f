"""The value of a sympy tree at a point, exactly where it is rational, and never for long.

The tree is walked here and not evaluated by sympy: what would not end is refused by its size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from fractions import Fraction

import mpmath
import sympy

MAX_BITS = 100_000  # of an exact number
MAX_WORK = 60_000  # nodes that one comparison may evaluate, some seconds
MAX_TERMS = 1000  # of a sum or product


class Unknown(ValueError):
    """An expression that cannot be evaluated here, with the reason."""


@dataclasses.dataclass
class Work:
    """What is left of the nodes that one comparison may evaluate."""

    left: int = MAX_WORK

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def spend(self) -> None:
        self.left -= 1
        if self.spent:
            raise Unknown("too much to compute")


def is_real(value) -> bool:
    return mpmath.im(value) == 0 or abs(mpmath.im(value)) < abs(value) * mpmath.mpf(10) ** -100


def numeric(value: Fraction | mpmath.mpf | mpmath.mpc):
    """The value for mpmath, at its precision."""
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def evaluate(node: sympy.Basic, point: dict, work: Work):
    """The value of a tree: a Fraction where it is rational, else of mpmath at its precision.

    Raises Unknown for what has no value at this point, is too large, or is no number.
    """
    try:
        return _evaluate(node, point, work, 0)
    except (ZeroDivisionError, OverflowError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, Unknown):
            raise
        raise Unknown(f"{type(error).__name__}") from error


def _evaluate(node, point: dict, work: Work, depth: int):
    work.spend()
    if depth > 100:
        raise Unknown("nested too deeply")
    if node.is_Rational:
        return Fraction(int(node.p), int(node.q))
    if node.is_Symbol:
        if node.name in point:
            return point[node.name]
        if node.name == "i":  # that is not the index of a sum
            return mpmath.mpc(0, 1)
        raise Unknown(f"symbol {node.name}")
    name = type(node).__name__
    if name in _CONSTANTS:
        return _CONSTANTS[name]()
    if name in ("Sum", "Product"):
        return _series(node, point, work, depth)
    values = [_evaluate(argument, point, work, depth + 1) for argument in node.args]
    if name in _EXACT:
        return _EXACT[name](*values)
    if name in _FUNCTIONS:
        result = _FUNCTIONS[name](*(numeric(value) for value in values))
        if not mpmath.isfinite(result):
            raise Unknown(f"{name} without a value")
        return result
    if node.is_Function and node.func.__class__.__name__ == "UndefinedFunction":
        return _unknown_function(name, values)
    raise Unknown(name)


def _add(*values):
    return functools.reduce(lambda a, b: _exact(a, b, lambda x, y: x + y), values)


def _multiply(*values):
    return functools.reduce(lambda a, b: _exact(a, b, lambda x, y: x * y), values)


def _exact(a, b, operation):
    if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
        a, b = numeric(a), numeric(b)
    result = operation(a, b)
    if (
        isinstance(result, Fraction)
        and max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS
    ):
        raise Unknown("too many digits")
    return result


def _power(base, exponent):
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits > 1 and abs(exponent.numerator) * bits > MAX_BITS:
                raise Unknown("too many digits")
            if base == 0 and exponent <= 0:
                raise Unknown("0 to the power 0 or below")
            if abs(base) == 1:  # whatever the exponent
                return base if exponent.numerator % 2 else Fraction(1)
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:  # the real root of an odd degree
            root = _power(-base, exponent)
            return -root if exponent.numerator % 2 else root
        root = _rational_root(base, exponent)
        if root is not None:
            return root
    base, exponent = numeric(base), numeric(exponent)
    if base == 0:
        if mpmath.re(exponent) > 0:
            return mpmath.mpf(0)
        raise Unknown("a power of 0")
    _check_size(exponent * mpmath.log(base))
    return mpmath.power(base, exponent)


def _rational_root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """`4^{1/2}` as 2 exactly, where it is rational."""
    if base < 0 or exponent.denominator > 64:
        return None
    roots = []
    for part in (base.numerator, base.denominator):
        root, exact = sympy.integer_nthroot(part, exponent.denominator)
        if not exact:
            return None
        roots.append(int(root))
    return _power(Fraction(*roots), Fraction(exponent.numerator)) if roots[0] else None


def _check_size(logarithm) -> None:
    if abs(logarithm) > MAX_BITS:
        raise Unknown("too many digits")


def _exponential(value):
    _check_size(numeric(value))
    return Fraction(1) if value == 0 else mpmath.exp(numeric(value))


def _logarithm(value, base=None):
    if value == 0:
        raise Unknown("the logarithm of 0")
    if base is not None and isinstance(value, Fraction) and isinstance(base, Fraction):
        if value > 0 and base > 1:
            with mpmath.workdps(50):
                guess = round(float(mpmath.log(numeric(value)) / mpmath.log(numeric(base))))
            if abs(guess) < 1000 and _power(base, Fraction(guess)) == value:
                return Fraction(guess)
    top = mpmath.log(numeric(value))
    return top if base is None else top / mpmath.log(numeric(base))


def _whole(value, limit: int) -> int:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= limit):
        raise Unknown("no small whole number")
    return int(value)


def _factorial(value):
    return Fraction(int(mpmath.factorial(0)) if value == 0 else _product(_whole(value, 3000)))


@functools.lru_cache(maxsize=64)
def _product(count: int) -> int:
    result = 1
    for factor in range(2, count + 1):
        result *= factor
    return result


def _binomial(top, bottom):
    n, k = _whole(top, 5000), _whole(bottom, 5000)
    return Fraction(int(sympy.binomial(n, k)))


def _rounded(how):
    def apply(value):
        if isinstance(value, Fraction):
            return Fraction(how(value))
        if not is_real(value):
            raise Unknown("rounding what is not real")
        return Fraction(int(mpmath.floor(value.real) if how is _floor else mpmath.ceil(value.real)))

    return apply


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


def _ceiling(value: Fraction) -> int:
    return -_floor(-value)


def _absolute(value):
    return abs(value)


def _modulo(value, divisor):
    if not (isinstance(value, Fraction) and isinstance(divisor, Fraction)) or divisor == 0:
        raise Unknown("a remainder of no rationals")
    return value % divisor


def _extreme(how):
    def apply(*values):
        if not all(is_real(numeric(value)) for value in values):
            raise Unknown("an order of what is not real")
        return how(values, key=lambda value: mpmath.re(numeric(value)))

    return apply


def _series(node, point: dict, work: Work, depth: int):
    """A sum or product over a small range of whole numbers."""
    body, *limits = node.args
    if len(limits) != 1 or len(limits[0]) != 3:
        raise Unknown("a sum without limits")
    name, low, high = limits[0]
    low, high = (_evaluate(limit, point, work, depth + 1) for limit in (low, high))
    if not all(isinstance(x, Fraction) and x.denominator == 1 for x in (low, high)):
        raise Unknown("a sum without whole limits")
    if high < low - 1:
        raise Unknown("a sum over nothing")
    if high - low > MAX_TERMS:
        raise Unknown("a long sum")
    adding = type(node).__name__ == "Sum"
    total = Fraction(0 if adding else 1)
    for index in range(int(low), int(high) + 1):
        term = _evaluate(body, point | {name.name: Fraction(index)}, work, depth + 1)
        total = _add(total, term) if adding else _multiply(total, term)
    return total


def _unknown_function(name: str, values: list):
    """A fixed smooth function of the arguments for every name: f(x) equals f(x) alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    seed = mpmath.mpf(int.from_bytes(digest, "big") % 9973) / 9973
    weighed = (numeric(value) * (place + 2) for place, value in enumerate(values))
    return mpmath.sin(sum(weighed, 2 * seed))


_CONSTANTS = {
    "Pi": lambda: +mpmath.pi,
    "Exp1": lambda: +mpmath.e,
    "ImaginaryUnit": lambda: mpmath.mpc(0, 1),
}
_EXACT = {
    "Add": _add,
    "Mul": _multiply,
    "Pow": _power,
    "exp": _exponential,
    "log": _logarithm,
    "factorial": _factorial,
    "binomial": _binomial,
    "Abs": _absolute,
    "floor": _rounded(_floor),
    "ceiling": _rounded(_ceiling),
    "Mod": _modulo,
    "Max": _extreme(max),
    "Min": _extreme(min),
}
_FUNCTIONS = {
    name: getattr(mpmath, name)
    for name in (
        "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch "
        "asinh acosh atanh"
    ).split()
} | {"conjugate": mpmath.conj, "re": mpmath.re, "im": mpmath.im, "sign": mpmath.sign}
