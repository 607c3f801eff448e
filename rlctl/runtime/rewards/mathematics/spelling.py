"""One spelling for equal LaTeX: commands, spaces, signs and numbers that mean the same.

`spell` returns text with plain operators (`+ - * / ^ _`), `\\frac{a}{b}` with braces, `\\text{…}`
for words, and commands for everything else. It does not parse.
"""

from __future__ import annotations

import re

from rlctl.runtime.rewards.mathematics import names

_SIGNS = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("×∗＊⋅·∙•", "*"),
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u3000", " "),
    # Thin spaces, which separate groups of digits.
    **dict.fromkeys("\u2009\u200a\u202f\u205f", "\\,"),
    **dict.fromkeys("\u200b\u2060\ufeff", ""),
    **{
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "＋": "+",
        "＝": "=",
        "％": "%",
        "，": ",",
        "。": ".",
        "：": ":",
    },
    **{"≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx "},
    **{"∞": "\\infty ", "√": "\\sqrt ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm "},
    **{"∓": "\\mp ", "∅": "\\emptyset ", "°": "^\\circ ", "º": "^\\circ ", "ℝ": "\\mathbb{R}"},
    **{"ℤ": "\\mathbb{Z}", "⟨": "\\langle ", "⟩": "\\rangle ", "′": "'", "“": '"', "”": '"'},
    **{
        "’": "'",
        "∛": "\\sqrt[3]",
        "€": "\\euro ",
        "£": "\\pounds ",
        "¥": "\\yen ",
        "₹": "\\rupee ",
    },
    **{"（": "(", "）": ")", "∖": "\\setminus ", "≡": "\\equiv "},
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
}
_GREEK = "alpha,beta,gamma,delta,epsilon,zeta,eta,theta,iota,kappa,lambda,mu,nu,xi"
_SIGNS |= {chr(0x3B1 + index): f"\\{name} " for index, name in enumerate(_GREEK.split(","))}
_SIGNS |= {
    "π": "\\pi ",
    "ρ": "\\rho ",
    "σ": "\\sigma ",
    "τ": "\\tau ",
    "φ": "\\phi ",
    "ω": "\\omega ",
}
_SIGNS |= {"ϕ": "\\phi ", "Δ": "\\Delta ", "Σ": "\\Sigma ", "Ω": "\\Omega ", "ψ": "\\psi "}
_FRACTIONS = {
    **{"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5)},
    **{"⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8)},
    **{"⅞": (7, 8)},
}
_SIGNS |= {sign: f"\\frac{{{top}}}{{{below}}}" for sign, (top, below) in _FRACTIONS.items()}
_TABLE = str.maketrans(_SIGNS)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_RENAMED = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **dict.fromkeys(("dbinom", "tbinom", "tbinom"), "binom"),
    **{"leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "<"},
    **{
        "gt": ">",
        "lvert": "|",
        "rvert": "|",
        "vert": "|",
        "mid": "|",
        "lbrack": "[",
        "rbrack": "]",
    },
    **{"lbrace": "\\{", "rbrace": "\\}", "cdot": "*", "times": "*", "ast": "*", "div": "/"},
    **{"colon": ":", "degree": "^\\circ", "degrees": "^\\circ", "varnothing": "emptyset"},
    **{
        "ldots": "dots",
        "cdots": "dots",
        "infin": "infty",
        "varphi": "phi",
        "varepsilon": "epsilon",
    },
    **{"arcsec": "arcsec", "lparen": "(", "rparen": ")", "prime": "'", "tg": "tan", "ctg": "cot"},
    **{
        "land": "\\text{ and }",
        "wedge": "\\text{ and }",
        "lor": "\\text{ or }",
        "vee": "\\text{ or }",
    },
    **{"implies": "=>", "rightarrow": "=>", "Rightarrow": "=>", "to": "=>", "iff": "=>"},
    **{"reals": "\\mathbb{R}", "R": "\\mathbb{R}", "textdegree": "^\\circ", "dollar": "\\$"},
}
_DROPPED = names(
    "left right displaystyle textstyle scriptstyle limits nolimits mathstrut strut big "
    "Big bigl bigr Bigl Bigr bigg Bigg biggl biggr Biggl Biggr rm bf it sf tt cal mathsf "
    "middle noindent centering null relax nonumber hline boldmath"
)
_SPACES = names("quad qquad enspace thinspace space hfill")
_COMMAND = re.compile(r"\\([A-Za-z]+)[ \t\n]*")
_WORDS = re.compile(
    r"\\(?:text|mathrm|textrm|textbf|textit|textsf|texttt|textnormal|mbox|hbox|emph|mathbf|mathit"
    r"|mathsf|mathtt|boldsymbol|bm|operatorname\*?|underline|textcolor\{\w+\}|color\{\w+\}|cancel)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_LETTER_UNITS = frozenset("mgsLhNJWVK")
_ROMAN = re.compile(r"\\math(?:cal|frak|scr)\s*\{\s*(\w)\s*\}")
_FUNCTION = re.compile(
    r"arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|det|max|min|sinh|cosh|tanh"
)
_THIN = r"(?:\{,\}|\\,|\\;|\\:|\\ |\\thinspace|,\\!|\\!,\\!|\\!,|~|\{\\,\})"
_THOUSANDS = re.compile(rf"(?<=\d)\s?{_THIN}\s?(?=\d{{3}}(?!\d))")
_THIN_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\hspace\{[^{}]*\}|\\h?phantom\{[^{}]*\}|\\\n")
_DELIMITERS = re.compile(r"\\[()]|\\\[(?!\d*(?:pt|em|ex|mm|cm)\])|\\\](?!\})")
_ROW_SKIP = re.compile(r"\\\\\[\d.]+(?:pt|em|ex|mm|cm)\]")
_BARE_FRACTION = re.compile(r"\\frac\s*(\{|[^\s{\\]|\\[A-Za-z]+)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.A-Za-z])")
_X_TIMES = re.compile(r"(\d)\s*[xX]\s*(10\s*\^)")
_MIXED = re.compile(r"(?<![\d.^_/*}\)])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}(?!\s*\^)")
_MIXED_PLAIN = re.compile(r"(?<![\d.^_/*,\)}])(\d+) +(\d+)\s?/\s?(\d+)(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot|overset\{\\cdot\})\s*\{(\d+)\}")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
_TEMPERATURE = re.compile(
    r"\^\s*\\circ\s*(?:\\text\s*\{\s*)?([CF])\s*\}?(?![A-Za-z])|"
    r"\\text\s*\{\s*\^\s*\\circ\s*([CF])\s*\}"
)


def spell(text: str) -> str:
    """Return `text` in the spelling that the reader expects."""
    text = text.translate(_TABLE)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[₀-₉]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = text.replace("**", " ").replace("\\$", "\\dollar ").replace("$", " ")
    text = re.sub(r"\\dollar\b ?", "\\$", text)
    text = _ROW_SKIP.sub(r"\\\\", text)
    text = _DELIMITERS.sub(" ", text)
    text = _THOUSANDS.sub("", text)
    text = _OVER.sub(_fraction, text)
    text = _THIN_SPACES.sub(" ", text)
    text = _expand_words(text)
    text = _COMMAND.sub(_rename, text)
    text = text.replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ")
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\\circ(?![A-Za-z])", "^\\\\circ ", text)
    text = re.sub(r"\^\s*\^", "^", text)
    text = _TEMPERATURE.sub(lambda m: f"\\text{{ degrees {m[1] or m[2]}}}", text)
    return _spell_numbers(_brace_fractions(text)).strip()


def _fraction(match: re.Match[str]) -> str:
    name = "frac" if match[2] == "over" else "binom"
    return f"\\{name}{{{match[1]}}}{{{match[3]}}}"


def _rename(match: re.Match[str]) -> str:
    name = match[1]
    if name in _DROPPED | _SPACES:
        return " "
    renamed = _RENAMED.get(name, name)
    return f"\\{renamed} " if renamed.isalpha() else f"{renamed} "


def _expand_words(text: str) -> str:
    """Return the text with `\\text{…}` around words only: numbers and single letters need none."""
    text = _ROMAN.sub(r"\1", text)
    for _ in range(4):  # depth of \textbf{\text{…}}
        before = text
        text = _WORDS.sub(_word, text)
        if text == before:
            break
    return text.replace("\x00", "\\text")


def _word(match: re.Match[str]) -> str:
    inner = match[1].strip()
    command = match[0][1:].partition("{")[0]
    if _FUNCTION.fullmatch(inner) and command.startswith(("operatorname", "mathrm")):
        return f"\\{inner} "
    is_math = not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", inner))
    if is_math or "\x00" in inner or command.startswith(("underline", "cancel")):
        return f" {inner} "
    is_text = command.startswith(("text", "mbox", "hbox", "emph")) or inner in _LETTER_UNITS
    if not is_text and len(inner) == 1:
        return inner
    return f"\x00{{{match[1]}}}"


def _brace_fractions(text: str) -> str:
    """Return the text with braces in `\\frac12`, `\\frac1{2}`, `\\sqrt3` and `\\binom52`."""
    for name, count in (("frac", 2), ("binom", 2), ("sqrt", 1)):
        parts = text.split(f"\\{name} ")
        rest = parts[0]
        for part in parts[1:]:
            rest += f"\\{name}{_braced(part.lstrip(), count)}"
        text = rest
    return text


def _braced(text: str, count: int) -> str:
    """Return `text`, whose first `count` arguments get braces."""
    option = re.match(r"\[[^\]]*\]\s*", text)
    done = ""
    if option:
        done = option[0].strip()
        text = text[option.end() :]
    for _ in range(count):
        text = text.lstrip()
        if text.startswith(("{", "(")) or not text:
            end = closing(text, 0) + 1
            if text.startswith("("):
                if count > 1:
                    return done + text
                done = f"{done}{{{text[:end]}}}"
                text = text[end:]
                continue
            if end == 0:
                return done + text
            done = done + text[:end]
            text = text[end:]
            continue
        # TeX takes one token; people write \sqrt13 for the root of 13.
        pattern = r"\\[A-Za-z]+ ?|."
        if count == 1:
            pattern = rf"\d+(?:\.\d+)?|{pattern}"
        token = re.match(pattern, text)
        assert token is not None, "the text is not empty"
        done = f"{done}{{{token[0]}}}"
        text = text[token.end() :]
    return done + text


def closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`, or -1."""
    depth = 0
    for index in range(start, len(text)):
        sign = text[index]
        is_escaped = index > 0 and text[index - 1] == "\\"
        if sign in "{(" and not (is_escaped and sign == "{"):
            depth += 1
        elif sign in "})" and not (is_escaped and sign == "}"):
            depth -= 1
            if depth == 0:
                return index
    return -1


def _spell_numbers(text: str) -> str:
    text = re.sub(r"\{\s*(-?[\d.]+)\s*\}", r"{\1}", text)
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(r"(\1*10^{\2})", text)
    text = _X_TIMES.sub(r"\1*\2", text)
    text = _MIXED.sub(_mixed, text)
    return _MIXED_PLAIN.sub(_mixed, text)


def _mixed(match: re.Match[str]) -> str:
    whole, top, below = match.groups()
    if len(top) > 9 or len(below) > 9 or not 0 < int(top) < int(below):
        return match[0]
    return f"({whole}+{top}/{below})"


def _repeating(match: re.Match[str]) -> str:
    whole = match[1] or "0"
    once = match[2]
    again = match[3]
    if len(once) + len(again) > 50:
        return match[0]
    nines = "9" * len(again) + "0" * len(once)
    zeros = "1" + "0" * len(once)
    return f"({whole}+{once or 0}/{zeros}+{again}/{nines})"
