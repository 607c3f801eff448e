"""Checks of IFEval's instructions (arXiv 2311.07911), and the reward for following all of a row.

Sentences end with `.`, `!` or `?` before a space, which the original asks NLTK for. The original
also checks that text in one case is English. `language:response_language` has no check here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from rlctl.plugins import declare

Given = dict[str, Any]  # settings of an instruction

_SENTENCE = r"[^.!?]*\w[^.!?]*[.!?]+(?=\s|$)|[^.!?]*\w[^.!?]*$"
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def _count(number: int, given: Given, name: str) -> bool:
    """Return whether a number is less than a setting, or at least as large, as `*relation` says."""
    is_less = any(key.endswith("relation") and given[key] == "less than" for key in given)
    return number < given[name] if is_less else number >= given[name]


def _times(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _paragraphs(text: str, given: Given) -> bool:
    filled = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(filled[1:-1]) and sum(filled) == given["num_paragraphs"]


def _nth_paragraph(text: str, given: Given) -> bool:
    parts = text.split("\n\n")
    nth = given["nth_paragraph"]
    number = sum(bool(part.strip()) for part in parts)
    if number != given["num_paragraphs"] or nth > number or not parts[nth - 1].strip():
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == given["first_word"].lower()


def _highlights(text: str, given: Given) -> bool:
    found = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)
    return _count(sum(bool(each.strip("*").strip()) for each in found), given, "num_highlights")


def _postscript(text: str, given: Given) -> bool:
    marker = given["postscript_marker"].strip()
    pattern = _POSTSCRIPTS.get(marker) or re.escape(marker.lower())
    return bool(re.search(pattern, text.lower()))


def _json(text: str, _: Given) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, _: Given) -> bool:
    parts = [part.strip() for part in text.split("******")]
    found = list(filter(None, parts))
    return all(parts[1:-1]) and len(found) == 2 and found[0] != found[1]


CHECKS: dict[str, Callable[[str, Given], bool]] = {
    "keywords:existence": lambda text, given: all(_times(w, text) for w in given["keywords"]),
    "keywords:frequency": lambda t, g: _count(_times(g["keyword"].strip(), t), g, "frequency"),
    "keywords:forbidden_words": lambda text, given: (
        not any(_times(rf"\b{word}\b", text) for word in given["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda t, g: _count(
        t.lower().count(g["letter"].lower()), g, "let_frequency"
    ),
    "length_constraints:number_sentences": lambda t, g: _count(
        _times(_SENTENCE, t), g, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda t, g: _count(_times(r"\w+", t), g, "num_words"),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda t, g: _count(
        _times(r"\[.*?\]", t), g, "num_placeholders"
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, g: (
        _times(r"(?m)^\s*\*[^\*].*$|^\s*-.*$", t) == g["num_bullets"]
    ),
    "detectable_format:constrained_response": lambda t, _: any(each in t for each in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda t, g: _count(
        len(re.findall(re.escape(g["section_spliter"].strip()) + r"\s?\d+", t)), g, "num_sections"
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda t, _: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", t)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, g: (
        t.strip().lower().startswith(g["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda t, g: (
        t.strip().strip('"').lower().endswith(g["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda t, _: len(t.strip()) > 1 and t.strip()[0] == '"' == t.strip()[-1],
    "change_case:capital_word_frequency": lambda t, g: _count(
        sum(map(str.isupper, re.findall(r"[\w'-]+", t))), g, "capital_frequency"
    ),
    "change_case:english_capital": lambda t, _: t.isupper(),
    "change_case:english_lowercase": lambda t, _: t.islower(),
    "punctuation:no_comma": lambda t, _: "," not in t,
}


@declare(data_sources=("google/IFEval",))
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Return 1.0 if the response follows all instructions of the row, else 0.0.

    The component `instructions` is the share that it follows. Raises ValueError for an instruction
    without a check.
    """
    del data_source, extra_info
    if unknown := [each["id"] for each in ground_truth if each["id"] not in CHECKS]:
        raise ValueError(f"no check of {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    is_text = bool(solution_str.strip())
    followed = [is_text and CHECKS[each["id"]](solution_str, each) for each in ground_truth]
    share = sum(followed) / max(1, len(followed))
    return {"score": float(all(followed)), "instructions": share}
