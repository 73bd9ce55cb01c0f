r"""Whether two expressions have the same value: exactly where both are rational, else by comparing
them at several points with 150 and 300 digits.

An expression is LaTeX, or a number as a Fraction. The parser is latex2sympy2_extended (that of
math-verify); the tree that it makes is never evaluated, simplified or printed by sympy, for
`9^{9^{9^9}}` would not end. What is too large, unknown or has no parse is equal to nothing here.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from fractions import Fraction

import mpmath
import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from xrpo_jax.verify.tree_value import Unknown, Work, evaluate, is_real, numeric

Side = str | Fraction

MAX_LATEX = 300  # characters; the parser takes milliseconds a token
DIGITS = (150, 300)
MAX_DEPTH = 10  # of brackets
MOST = {"^": 40, "|": 8}  # of signs that make the parser slow
COMMANDS = frozenset(  # what the parser may see: others build matrices, or compute
    (
        "frac sqrt binom pi infty cdot times div ast sum prod max min gcd lcm bmod mod pmod "
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lfloor rfloor "
        "lceil rceil overline bar hat vec alpha beta gamma delta epsilon varepsilon zeta eta "
        "theta vartheta iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma "
        "Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
    ).split()
)
STEPPED = ("Abs", "floor", "ceiling", "Max", "Min", "Mod", "sign")  # looked at in more places
# Marks that the parser drops: f', A^T, a subscript of a number.
_DROPPED = re.compile(r"'|\\prime|\^\{?\s*(?:T|\\top|\\dagger)(?![A-Za-z])|(?<![A-Za-z_}])[0-9]_")
_PRODUCTS = (  # the parser takes 2(3) for 2 + 3, and x(2) for a function
    re.compile(r"(?<![_^0-9.}])([0-9]+)\s*(?=\()"),
    re.compile(r"(\))\s*(?=[(0-9])"),
    re.compile(r"(?<![A-Za-z\\_^])([abcdkmnrstxyz]|\\pi)\s*(?=\()"),
)
_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)


def equal(first: Side, second: Side) -> bool:
    """Whether two expressions agree wherever both are real; False where nobody can tell."""
    try:
        return _agree(tree(first), tree(second), Work())
    except Unknown:
        return False


def proportional(first: tuple[Side, Side], second: tuple[Side, Side], *, positive: bool) -> bool:
    """Whether `a = b` and `c = d` are one equation: a - b is a constant multiple of c - d.

    `positive` demands a positive multiple, as inequalities do.
    """
    try:
        trees = [tree(side) for side in (*first, *second)]
    except Unknown:
        return False
    names = sorted(set().union(*(_symbols(one) for one in trees)))
    work, ratio, told = Work(), None, 0
    for point in _points(names, 16) if names else ():
        try:
            with mpmath.workdps(DIGITS[0]):
                a, b, c, d = (numeric(evaluate(one, point, work)) for one in trees)
                above, below = a - b, c - d
                nothing = [abs(gap) < mpmath.mpf(10) ** -100 for gap in (above, below)]
                if any(nothing):
                    if not all(nothing):
                        return False
                    continue
                found = above / below
                ratio = found if ratio is None else ratio
                if abs(found - ratio) > abs(ratio) * mpmath.mpf(10) ** -80:
                    return False
                told += 1
        except Unknown:
            if work.spent:
                return False
    if told < 3:
        return False
    return not positive or (mpmath.im(ratio) == 0 and mpmath.re(ratio) > 0)


def value_of(side: Side) -> Fraction | mpmath.mpf | mpmath.mpc | None:
    """The value of an expression without variables; None where there is none."""
    try:
        found = tree(side)
        with mpmath.workdps(DIGITS[0]):
            return None if _symbols(found) else evaluate(found, {}, Work())
    except Unknown:
        return None


@functools.lru_cache(maxsize=4096)
def tree(side: Side) -> sympy.Basic:
    """The unevaluated sympy tree of an expression; raises Unknown where there is none."""
    if isinstance(side, Fraction):
        return sympy.Rational(side.numerator, side.denominator)
    text = _prepared(side)
    try:
        found = latex2sympy(text, conversion_config=_CONVERSION, normalization_config=None)
    except RecursionError as error:
        raise Unknown("nested too deeply") from error
    except Exception as error:  # the parser raises all kinds
        raise Unknown(f"no parse ({type(error).__name__})") from error
    if not isinstance(found, sympy.Expr):
        raise Unknown(f"a {type(found).__name__}")
    return found


def _prepared(latex: str) -> str:
    """The text as the parser reads it right; raises Unknown for what it must not see."""
    if len(latex) > MAX_LATEX:
        raise Unknown(f"{len(latex)} characters")
    if re.search(r"(?<![A-Za-z\\])[A-Za-z]{5,}", latex):
        raise Unknown("words")
    if r"\binom" in latex and re.search(r"[0-9]{5}", latex):  # the parser computes it
        raise Unknown("a large binomial")
    if _depth(latex) > MAX_DEPTH or any(latex.count(sign) > n for sign, n in MOST.items()):
        raise Unknown("nested too deeply")  # the parser takes time exponential in it
    if re.search(r"(?:\^[A-Za-z0-9]){5}", latex):
        raise Unknown("a tower of powers")
    if _DROPPED.search(latex):
        raise Unknown("a mark that the parser drops")
    text = re.sub(r"([0-9]+(?:\.[0-9]+)?)\s*°", r"(\\frac{\1 \\pi}{180})", latex)
    if "°" in text or "%" in text:
        raise Unknown("a sign outside of a number")
    text = re.sub(
        r"(?<![0-9])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])", lambda m: m[0].replace(",", ""), text
    )
    text = re.sub(r"(?<![0-9])([0-9]*)\.([0-9]+)(?:[eE]([+-]?[0-9]+))?", _decimal, text)
    if re.search(r"[0-9][eE][+-]?[0-9]", text):
        raise Unknown("a number with an exponent")
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    text = re.sub(r"\\(?:mathrm|operatorname|mathit|mathbf)\s*\{([A-Za-z]+)\}", _function, text)
    text = re.sub(r"(?<![A-Za-z0-9])([A-Za-z]|[0-9]+)!\s*\^", r"(\1!)^", text)
    # 1/6 π is a sixth of it; 1/6π may not be.
    text = re.sub(r"(?<![A-Za-z0-9}_^])([0-9]+)/([0-9]+) +(?=[\\A-Za-z])", r"\\frac{\1}{\2} ", text)
    if re.search(r"(?<![_^0-9.])[0-9]+ +[0-9]", text):
        raise Unknown("numbers side by side")
    for pattern in _PRODUCTS:
        text = pattern.sub(r"\1 \\cdot ", text)
    unknown = set(re.findall(r"\\([A-Za-z]+)", text)) - COMMANDS
    if unknown:
        raise Unknown(f"\\{min(unknown)}")
    return re.sub(  # a mixed number: the parser knows it only in some forms
        r"(?<![0-9.}^_/A-Za-z])([0-9]+)\s*\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}",
        r"(\1+\\frac{\2}{\3})",
        text,
    )


def _depth(latex: str) -> int:
    depth = deepest = 0
    for bracket in re.finditer(r"[(\[{]|[)\]}]", latex):
        depth += 1 if bracket[0] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _decimal(match: re.Match) -> str:
    """A decimal as a fraction of whole numbers, since the parser makes it a binary one."""
    whole, part, exponent = match.groups()
    if exponent is not None:
        raise Unknown("a number with an exponent")
    fraction = rf"(\frac{{{int(whole + part)}}}{{{10 ** len(part)}}})"
    return f"{{{fraction}}}" if match.string[: match.start()].endswith(("^", "_")) else fraction


def _function(match: re.Match) -> str:
    return match[1] if len(match[1]) == 1 else f"\\{match[1]} "


def _symbols(found: sympy.Basic) -> set[str]:
    """Names of the free variables; `i` is the imaginary unit."""
    return {symbol.name for symbol in found.free_symbols} - {"i"}


def _points(names: list[str], count: int) -> Iterable[dict]:
    """Values for the names, the same every time: small and large, of both signs, and whole."""
    for place in range(count):
        point = {}
        for name in names:
            digest = hashlib.blake2b(f"{place}/{name}".encode(), digest_size=8).digest()
            drawn = int.from_bytes(digest, "big")
            part = Fraction(drawn % 9973 + 31, 9973)
            point[name] = (
                part * 3,
                -part - Fraction(1, 7),
                Fraction(drawn % 11 + 2),
                part,
                part * 130 + 20,
                Fraction(drawn % 200 + 13),
                -part * 130 - 20,
                -Fraction(drawn % 60 + 1),
            )[place % 8]
        yield point


def _agree(first: sympy.Basic, second: sympy.Basic, work: Work) -> bool:
    names = sorted(_symbols(first) | _symbols(second))
    if not names:
        return _same(first, second, {}, work) is True
    trees = (first, second)
    imaginary = any(symbol.name == "i" for one in trees for symbol in one.free_symbols)
    stepped = any(
        type(node).__name__ in STEPPED for one in trees for node in one.atoms(sympy.Function)
    )
    told = 0
    for point in _points(names, 32 if stepped else 12):
        try:
            verdict = _same(first, second, point, work, real=not imaginary)
        except Unknown:
            if work.spent:
                return False
            continue
        if verdict is False:
            return False
        told += verdict is True
    return told >= 2


def _same(
    first: sympy.Basic, second: sympy.Basic, point: dict, work: Work, real: bool = False
) -> bool | None:
    """Whether both have one value at a point; None where `real` is asked for and one is not."""
    gaps = []
    for digits in DIGITS:
        with mpmath.workdps(digits):
            a, b = evaluate(first, point, work), evaluate(second, point, work)
            if isinstance(a, Fraction) and isinstance(b, Fraction):
                return a == b
            a, b = numeric(a), numeric(b)
            if real and not (is_real(a) and is_real(b)):
                return None
            gap, scale = abs(a - b), max(abs(a), abs(b))
            if gap > scale * mpmath.mpf(10) ** -100 and gap > mpmath.mpf(10) ** -100:
                return False
            gaps.append(max(gap, scale * mpmath.mpf(10) ** -digits))
    # A residue of cancellation shrinks with more digits; a small true difference does not.
    return gaps[1] <= gaps[0] * mpmath.mpf(10) ** -50
