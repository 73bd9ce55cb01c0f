r"""Where a completion states its answer; every function is linear in the length of the text.

The last complete `\boxed{}` (or `\fbox{}`), then `<answer>`, `#### 42`, "the answer is"; after the
thinking only. An answer that was begun and cut off is none: an older one does not take its place.
"""

from __future__ import annotations

import re

MAX_ANSWER = 1000  # characters; what is longer is no final answer

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\s*\{|\s*(?=[0-9\\-]))")
_BETWEEN_BOXES = re.compile(  # and nothing else: a sentence between them takes the first back
    r"(?:[\s$,;.|&*•{}()-]|\\\\|\\q?quad|\\text|\\[,;]|\b(?:and|or)\b|和"
    r"|\n\s*[0-9]{1,2}(?=[.)]))*"
)
_LABEL = re.compile(
    r"(?:\banswers?\b[*_]*\s*(?:is|are|=|:|：)|答案\s*[:：是为])[*_:：\s]*", re.IGNORECASE
)
# What explains an answer after it.
_REASON = re.compile(
    r"(?i),?\s+(?:because|since|which|as|so|where|that is|i\.e\.)\s|(?<=[0-9$]),\s+(?=[a-z]{3})"
)
_HASH = re.compile(r"\s*[-+$(.\\*]*[0-9\\].*")
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_LAST_NUMBER = re.compile(
    rf"(?:(?<![0-9A-Za-z)}}])[-−])?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:/[0-9]+|[eE][+-]?[0-9]{1,3})?(?:\\?%)?"
)
_MAX_BOXES = 50  # that are read together as one list


def after_thinking(completion: str) -> str | None:
    """What follows the last `</think>`; None while the thinking has not ended."""
    text = completion.rpartition("</think>")[2]
    return None if "<think>" in text else text


def boxed(text: str, *, joined: bool = True) -> str | None:
    r"""What the last `\boxed{}` holds; "" if it is empty or cut off, None if there is no box.

    Boxes with nothing but commas, "and" or white space between them are one answer of several
    parts, unless not `joined`: `\boxed{2}, \boxed{5}` is "2, 5".
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    last = _inside(text, starts[-1])
    if last is None:
        return ""
    parts, begin = [last[0]], starts[-1].start()
    for start in reversed(starts[-_MAX_BOXES:-1] if joined else []):
        before = _inside(text, start)
        if before is None or before[1] > begin:  # cut off, or around the last one
            break
        if not _BETWEEN_BOXES.fullmatch(text[before[1] : begin][:MAX_ANSWER]):
            break
        parts.append(before[0])
        begin = start.start()
    return ", ".join(dict.fromkeys(reversed(parts)))


def _inside(text: str, box: re.Match) -> tuple[str, int] | None:
    """What a box holds and where it ends; None where it does not."""
    end = box.end()
    if not box[0].endswith("{"):  # `\boxed 8` and `\boxed\frac{1}{3}`
        bare = re.match(r"[^\s$]*", text[end : end + MAX_ANSWER])[0]
        return bare.rstrip(".,"), end + len(bare)
    depth, inside = 1, text[end : end + MAX_ANSWER + 1]
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inside[: brace.start()].strip(), end + brace.end()
    return None


def tagged(text: str) -> str | None:
    """What the last `<answer>` holds; "" if it is empty or not closed, None if there is none."""
    start = text.rfind("<answer>")
    if start < 0:
        return None
    start += len("<answer>")
    end = text.find("</answer>", start)
    inside = text[start:end].strip() if end >= 0 else ""
    return labelled(inside) or inside  # "The answer is 7"


def hashed(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K writes it; None without a number."""
    start = text.rfind("####")
    marked = _HASH.match(text[start + 4 : start + 4 + 2 * MAX_ANSWER]) if start >= 0 else None
    return marked[0].strip() if marked else None  # a Markdown heading is no marker


def labelled(text: str) -> str | None:
    """What follows the last "the answer is", "Answer:" or 答案： on its line; None for nothing."""
    label = None
    for match in _LABEL.finditer(text):
        label = match
    if label is None:
        return None
    line = text[label.end() : label.end() + 2 * MAX_ANSWER].partition("\n")[0]
    line = _REASON.split(line, maxsplit=1)[0]
    return re.split(r"\.(?:\s|$)|。", line, maxsplit=1)[0].strip(" *_") or None


def last_number(text: str) -> str | None:
    """The last number of a text, with its sign, fraction, exponent and percent sign."""
    found = None
    for match in _LAST_NUMBER.finditer(text):
        found = match
    return found[0] if found else None


def stated(completion: str, *, thinking: bool = False) -> str | None:
    """The answer as the text states it; "" where it is cut off, None where nothing is stated.

    The last box, `<answer>`, `#### x`, "the answer is x", in this order. `thinking` reads the
    thinking, too.
    """
    text = completion if thinking else after_thinking(completion)
    if text is None:  # what an unfinished thinking holds is no answer
        return ""
    for find in (boxed, tagged, hashed, labelled):
        found = find(text)
        if found is not None:
            return found
    return None


def well_formed(completion: str, *, opened: bool = False) -> bool:
    """Whether it is one `<think>...</think>` and then one `<answer>...</answer>` that holds text.

    `opened`: the prompt ends with the opening `<think>`, so that the completion has none.
    """
    text = completion.strip()
    if opened and not text.startswith("<think>"):
        text = f"<think>{text}"
    if any(
        text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")
    ) or not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    thought, _, rest = text.partition("</think>")
    rest = rest.strip()
    return "answer>" not in thought and rest.startswith("<answer>") and bool(tagged(rest))
