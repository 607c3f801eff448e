"""Checks of IFEval's instructions (arXiv 2311.07911), and the reward for following all of a row.

Sentences end with `.`, `!` or `?` before a space, which the original asks NLTK for. The original
also checks that text in one case is English. `language:response_language` has no check here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from rlctl.plugins import declare

Check = Callable[[str, dict[str, Any]], bool]

_SENTENCE = re.compile(r"[^.!?]*\w[^.!?]*[.!?]+(?=\s|$)|[^.!?]*\w[^.!?]*$")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _count(number: int, given: dict[str, Any], name: str, relation: str = "relation") -> bool:
    """Return whether a number has the relation "at least" or "less than" to a setting."""
    wanted = given[name]
    return number < wanted if given.get(relation) == "less than" else number >= wanted


def _times(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _paragraphs(text: str, given: dict[str, Any]) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1] if len(parts) > 1 else []
    number = len(parts) - (not parts[0].strip()) - (len(parts) > 1 and not parts[-1].strip())
    return all(part.strip() for part in inner) and number == given["num_paragraphs"]


def _nth_paragraph(text: str, given: dict[str, Any]) -> bool:
    parts, nth = text.split("\n\n"), given["nth_paragraph"]
    number = sum(bool(part.strip()) for part in parts)
    if number != given["num_paragraphs"] or nth > number or not parts[nth - 1].strip():
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == given["first_word"].lower()


def _highlights(text: str, given: dict[str, Any]) -> bool:
    found = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)
    return sum(bool(each.strip("*").strip()) for each in found) >= given["num_highlights"]


def _postscript(text: str, given: dict[str, Any]) -> bool:
    marker = given["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _json(text: str, given: dict[str, Any]) -> bool:
    del given
    body = re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, given: dict[str, Any]) -> bool:
    del given
    parts = text.split("******")
    found = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(found) == 2 and found[0] != found[1]


def _capitals(text: str, given: dict[str, Any]) -> bool:
    number = sum(word.isupper() for word in re.findall(r"[\w'-]+|[^\w\s]+", text))
    return _count(number, given, "capital_frequency", "capital_relation")


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, given: all(_times(w, text) for w in given["keywords"]),
    "keywords:frequency": lambda text, given: _count(
        _times(given["keyword"].strip(), text), given, "frequency"
    ),
    "keywords:forbidden_words": lambda text, given: (
        not any(_times(rf"\b{word}\b", text) for word in given["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda text, given: _count(
        text.lower().count(given["letter"].lower()), given, "let_frequency", "let_relation"
    ),
    "length_constraints:number_sentences": lambda text, given: _count(
        len(_SENTENCE.findall(text)), given, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, given: _count(
        len(_words(text)), given, "num_words"
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, given: (
        len(re.findall(r"\[.*?\]", text)) >= given["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, given: (
        len(re.findall(r"(?m)^\s*\*[^\*].*$|^\s*-.*$", text)) == given["num_bullets"]
    ),
    "detectable_format:constrained_response": lambda text, _: any(w in text for w in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"{re.escape(given['section_spliter'].strip())}\s?\d+", text))
        >= given["num_sections"]
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, _: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda text, _: (
        len(text.strip()) > 1 and text.strip()[0] == '"' == text.strip()[-1]
    ),
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text, _: text.isupper(),
    "change_case:english_lowercase": lambda text, _: text.islower(),
    "punctuation:no_comma": lambda text, _: "," not in text,
}


@declare(data_sources=("google/IFEval",))
def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Return 1.0 if the response follows all instructions of the row, else 0.0.

    Components: `instructions`, the share of them that it follows, and `loose`, 1.0 if a form of it
    without its first or last line or asterisks follows each. Raises ValueError for an instruction
    without a check.
    """
    del data_source, extra_info
    if unknown := [each["id"] for each in ground_truth if each["id"] not in CHECKS]:
        raise ValueError(f"no check of {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    strict = [_follows(solution_str, each) for each in ground_truth]
    loose = [any(_follows(form, each) for form in _forms(solution_str)) for each in ground_truth]
    share = sum(strict) / max(1, len(strict))
    return {"score": float(all(strict)), "instructions": share, "loose": float(all(loose))}


def _follows(text: str, instruction: dict[str, Any]) -> bool:
    return bool(text.strip()) and CHECKS[instruction["id"]](text, instruction)


def _forms(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for (first, last), stars in product(((0, 0), (1, 0), (0, 1), (1, 1)), (False, True)):
        form = "\n".join(lines[first : len(lines) - last]).strip() if first or last else text
        yield form.replace("*", "") if stars else form
