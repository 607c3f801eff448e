"""Units and words beside a number: what is ignored, what scales it, and what makes it no answer."""

from __future__ import annotations

import re

from rlctl.runtime.rewards.mathematics import names

# First name = the one that is compared.
_UNITS = (
    ("cm", "centimeter", "centimetre"),
    ("mm", "millimeter", "millimetre"),
    ("km", "kilometer", "kilometre"),
    ("m", "meter", "metre"),
    ("in", "inch", "inche"),
    ("ft", "foot", "feet"),
    ("yd", "yard"),
    ("mi", "mile"),
    ("g", "gram"),
    ("kg", "kilogram"),
    ("mg", "milligram"),
    ("lb", "pound", "lbs"),
    ("oz", "ounce"),
    ("s", "second", "sec"),
    ("min", "minute"),
    ("h", "hour", "hr"),
    ("day",),
    ("week",),
    ("month",),
    ("year", "yr"),
    ("L", "liter", "litre", "l"),
    ("mL", "milliliter", "millilitre", "ml"),
    ("gal", "gallon"),
    ("dollar", "usd", "\\$", "buck"),
    ("cent", "\\cent"),
    ("euro", "eur", "\\euro"),
    ("pound sterling", "\\pounds"),
    ("yen", "\\yen"),
    ("rupee", "\\rupee", "rs"),
    ("degree", "deg"),
    ("radian", "rad"),
    ("mph",),
    ("kph",),
    ("rpm",),
    ("unit",),
    ("pm", "p.m"),
    ("am", "a.m"),
)
_NAMES = {name: names[0] for names in _UNITS for name in names}
# Letters without \text{} that are no variables.
BARE_UNITS = frozenset(
    name for name in _NAMES if len(name) > 1 and name.isalpha() and name not in ("in", "gal", "rs")
)
_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
# Words that change the meaning of the number beside them.
_CHANGING = names(
    "or and not no if but than least most more less fewer between under over above below "
    "except minus plus times divided mod modulo remainder base half halves third thirds "
    "quarter quarters fourths tenths hundredths squared cubed is was wrong incorrect "
    "maybe almost nearly without k m b mil mio nd st th rd hundreds thousands millions "
    "billions dozens pi e root sqrt to from through versus vs with exponent power"
) - {"m"}
_IGNORED_BEFORE = re.compile(
    r"(?:(?:so|thus|hence|therefore|and|the|my|our|final|correct|answer|result|value|solution|"
    r"option|choice|it|that|which|is|are|equals?|be|=|:|we|get|have|about|approximately|only|"
    r"exactly|total|sum|area|volume|of|x|y|rs)[\s:,.]*)+",
    re.IGNORECASE,
)
PERCENT = frozenset(["percent", "per cent", "percentage", "pct", "percents"])


def is_lead_in(words: str) -> bool:
    """Return True for words before an answer that add nothing: "The answer is"."""
    return _IGNORED_BEFORE.fullmatch(words.strip()) is not None


def scale(words: str) -> tuple[int, str] | None:
    """Return the factor and the unit of the words after a number, or None if they are neither.

    "million dollars" is (1_000_000, "dollar"). A unit that is not known is "".
    """
    factor = 1
    rest = words.strip(" .,:;()~").split()
    while rest and rest[0].lower() in _SCALES:
        factor *= _SCALES[rest.pop(0).lower()]
    if len(rest) > 6 or any(word.lower().strip(".,") in _CHANGING for word in rest):
        return None
    if not all(re.fullmatch(r"[A-Za-zµ'/.\-]+[.,]?|\\\$|\\[a-z]+", word) for word in rest):
        return None
    return factor, unit(" ".join(rest))


def unit(words: str) -> str:
    """Return the compared name of a unit, "" if it is not known."""
    parts = re.split(r"\s+(?:per|a|an)\s+|\s*/\s*", words.strip())
    names = [_name(part) for part in parts]
    return "/".join(names) if all(names) else ""


def _name(word: str) -> str:
    word = word.strip(" .")
    power = ""
    for prefix, sign in (("square ", "^2"), ("sq ", "^2"), ("sq. ", "^2"), ("cubic ", "^3")):
        if word.lower().startswith(prefix):
            word = word[len(prefix) :].strip()
            power = sign
    for form in (
        word,
        word.lower(),
        word.lower().removesuffix("s"),
        word.lower().removesuffix("es"),
    ):
        if form in _NAMES:
            return _NAMES[form] + power
    return ""
