"""Words after a number: which are units, which are the same, and by which factor they differ."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

# Dimension: names with their size in its first unit. Other words are units of their own.
_TABLE = {
    "length": "m meter metre:1 mm millimeter millimetre:1/1000 cm centimeter centimetre:1/100 "
    "dm decimeter:1/10 km kilometer kilometre:1000 in inch inche:127/5000 ft foot feet:381/1250 "
    "yd yard:1143/1250 mi mile:201168/125 nm nanometer:1/1000000000 厘米:1/100 米:1 千米 公里:1000",
    "mass": "g gram:1 mg milligram:1/1000 kg kilogram:1000 lb pound:45359237/100000 "
    "oz ounce:45359237/1600000 千克 公斤:1000 克:1",
    "time": "s sec second:1 ms millisecond:1/1000 min minute:60 h hr hour:3600 day:86400 "
    "week:604800 秒:1 分 分钟:60 小时:3600 天:86400",
    "month": "month:1 year yr:12",
    "volume": "l liter litre:1 ml milliliter millilitre:1/1000 gallon gal:473176473/125000000 "
    "quart qt:473176473/500000000 pint pt:473176473/1000000000",
    "money": "dollar:1 cent:1/100",
    "energy": "J joule:1 kJ kilojoule:1000 eV:0.0000000000000000001602176634 "
    "keV:0.0000000000000001602176634 MeV:0.0000000000001602176634 erg:0.0000001",
    "power": "W watt:1 kW kilowatt:1000",
    "force": "N newton:1",
    "pressure": "Pa pascal:1 kPa kilopascal:1000",
    "frequency": "Hz hertz:1 kHz:1000 MHz:1000000",
    "amount": "mol mole:1 mmol:1/1000",
    "charge": "C coulomb:1",
    "current": "A ampere:1",
    "voltage": "V volt:1",
    "angle": "degree deg °:1",
    "arc": "radian rad:1",  # no rational factor to degrees
    "temperature": "K kelvin:1",
    "celsius": "celsius:1",
    "fahrenheit": "fahrenheit:1",
    "morning": "am a.m:1",
    "evening": "pm p.m:1",
}
UNITS = {
    name: (dimension, Fraction(row.split(":")[1]))
    for dimension, rows in _TABLE.items()
    for row in re.findall(r"[^:]+:\S+", rows)
    for name in row.split(":")[0].split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_SPOKEN = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour"}
_IDLE = ("of", "the", "a", "an", "each")
# Words that change the value, or deny it; no unit has one of them.
CHANGING = re.compile(
    r"(?i)(?<![A-Za-z])(?:"
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|"
    r"fifty|hundreds?|thousands?|score|[mbtr]+illion|dozen|gross|lakh|crore|half|halves|third|thirds|fourths|"
    r"fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|tens|squared|"
    r"cubed|factorial|doubled|tripled|halved|plus|minus|times|over|mod|modulo|choose|below|above|"
    r"negative|not|wrong|or|and|to|pi|sin|cos|tan|log|ln|is|if|for|than|approximately|about"
    r")(?![A-Za-z])|[万亿兆百倍]|分之|千(?![米克])"
)


def unit(words: str) -> tuple[tuple, Fraction] | None:
    """Dimensions with their powers, and the size, of "cm", "square inches" or "m/s^2".

    None where a word is no known unit.
    """
    size, dimensions, sign = Fraction(1), Counter(), 1
    tokens = _tokens(words)
    if not tokens:
        return None
    power = 1
    for token in tokens:
        if token == "per":
            sign = -1
            continue
        if token in _POWERS:
            power = _POWERS[token]
            continue
        name, raised = re.fullmatch(r"(.+?)(?:\^(-?[0-9]))?", token).groups()
        known = _known(name)
        if known is None:
            return None
        exponent = sign * power * int(raised or 1)
        dimensions[known[0]] += exponent
        size *= known[1] ** exponent
        power = 1
    found = tuple(sorted((name, count) for name, count in dimensions.items() if count))
    return found, size


def _tokens(words: str) -> list[str]:
    text = words.replace("^{", "^").replace("}", "").replace("{", "").replace("·", " ")
    text = re.sub(r"\\(?:cdot|,|;)\s*|~|\*", " ", text).replace("/", " per ")
    text = re.sub(r"(?i)degrees? (celsius|fahrenheit)", r"\1", text)
    text = re.sub(r"([ap])\.\s?m\.?", r"\1m", text)
    spoken = [_SPOKEN.get(token.lower(), token) for token in text.split()]
    tokens = " ".join(spoken).split()
    # "inches^2" and "cm ^2" are one token; a mark of its own belongs to the word before.
    joined: list[str] = []
    for token in tokens:
        token = token.strip(".,;")
        if token.startswith("^") and joined:
            joined[-1] += token
        elif token and token.lower() not in _IDLE:
            joined.append(token)
    return joined


def _known(name: str) -> tuple[str, Fraction] | None:
    for form in (name, name.lower(), name.lower().rstrip("s")):
        if form in UNITS:
            return UNITS[form]
    return None


def factor(gold: str, found: str) -> Fraction | None:
    """What a number with the unit `found` is times to have the unit `gold`; None if they differ.

    1 where either is "". Unknown units are the same when one says all that the other says.
    """
    if not gold or not found:
        return Fraction(1)
    one, other = unit(gold), unit(found)
    if one is not None and other is not None:
        return other[1] / one[1] if one[0] == other[0] else None
    mine, theirs = ({_stem(token) for token in _tokens(words)} for words in (gold, found))
    return Fraction(1) if mine <= theirs or theirs <= mine else None


def _stem(word: str) -> str:
    return re.sub(r"(?:es|s)$", "", word.lower())
