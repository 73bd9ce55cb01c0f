"""Finds the Python program in a completion: which block of it, and what goes before.

Everything takes time in proportion to the text; a text of more than LONGEST characters is no code.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
import textwrap

LONGEST = 2**18  # characters of code that are read; programs of people have a hundredth of that
PYTHON = ("", "python", "python3", "python2", "py", "py3", "ipython", "ipython3", "pycon", "sage")
# A fence stands at the start of a line, in a quote or list, or after words if it says python.
FENCE = re.compile(r"([ \t]*(?:>[ \t]?)*(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]+)?)(`{3,}|~{3,})(.*)")
LATE_FENCE = re.compile(r"(`{3,})[ \t]*(python3?|py3?)[ \t]*", re.IGNORECASE)
MOST_BLOCKS = 64  # the last blocks of a completion; earlier ones are not looked at
READS_INPUT = re.compile(r"\binput\b|\bstdin\b|\bopen\(0")
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """A program: `text`, run after `before` (imports and helpers), or why it cannot compile."""

    text: str
    before: str = ""
    problem: str = ""


def final_text(completion: str) -> str:
    """What follows the thinking; nothing where the thinking does not end."""
    text = completion.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def parsed(text: str) -> ast.Module | None:
    """The syntax tree, or None where the text is no Python, or too long."""
    try:
        return ast.parse(text) if len(text) <= LONGEST else None
    except UNREADABLE:
        return None


def problem_of(text: str) -> str:
    """Why a text is no Python, in a few words; "" where it is Python."""
    if len(text) > LONGEST:
        return f"longer than {LONGEST} characters"
    try:
        ast.parse(text)
    except UNREADABLE as error:
        line = getattr(error, "lineno", None)
        return f"{getattr(error, 'msg', error)}" + (f" (line {line})" if line else "")
    return ""


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks, in order: (language in lower case, code without the fence's indent)."""
    found: list[tuple[str, str]] = []
    opened, language, lines = "", "", []
    indent = 0
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        fence = FENCE.fullmatch(line)
        if not opened:
            late = None if fence or "```" not in line else LATE_FENCE.fullmatch(
                line[line.index("```") :]
            )  # fmt: skip
            if late:
                opened, language, lines, indent = late[1], "python", [], 0
            elif fence and "`" not in fence[3]:
                words = fence[3].strip().strip("{}").lstrip(".").split()
                language = re.split(r"[,:{]", words[0].lower())[0] if words else ""
                opened, lines, indent = fence[2], [], len(fence[1].expandtabs())
        elif fence and fence[2].startswith(opened) and not fence[3].strip():
            found.append((language, _dedented(lines, indent)))
            opened = ""
        else:
            lines.append(line)
    if opened:
        found.append((language, _dedented(lines, indent)))
    return found[-MOST_BLOCKS:]


def _dedented(lines: list[str], indent: int) -> str:
    """The lines without the indent that they have in common, at most the fence's own."""
    text = "\n".join(lines) + "\n"
    if not indent:
        return text
    common = textwrap.dedent(text)
    first, rest = lines[0] if lines else "", common.split("\n")[0]
    if len(first) - len(rest) <= indent:
        return common
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines) + "\n"


def is_program(tree: ast.Module | None) -> bool:
    """Whether there is a statement that does something: prose may read as a name or a constant."""
    if tree is None:
        return False
    calls = (ast.Call, ast.Await, ast.NamedExpr)
    return any(
        not isinstance(node, ast.Expr) or isinstance(node.value, calls) for node in tree.body
    )


def defined(tree: ast.Module) -> dict[str, ast.stmt]:
    """The names that a module's own statements bind, and the last statement that does."""
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(one.asname or one.name).partition(".")[0]: node for one in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        names[one.id] = node
    return names


def find_program(completion: str) -> Code | None:
    """The whole program of a completion: the last block that reads input, or else that is one.

    Without a fence the text itself, where it is a program. None: there is no code.
    """
    text = final_text(completion)
    fenced = blocks(text)
    python = [code for language, code in fenced if language in PYTHON and code.strip()]
    if not python:
        return Code(text=text) if not fenced and is_program(parsed(text)) else None
    programs = [code for code in python if is_program(parsed(code))]
    if not programs:
        broken = [code for code in python if problem_of(code)]
        return Code(text=broken[-1], problem=problem_of(broken[-1])) if broken else None
    reading = [code for code in programs if READS_INPUT.search(code)]
    return Code(text=(reading or programs)[-1])


def find_function(completion: str, names: tuple[str, ...], prefix: str = "") -> Code | None:
    """The program that defines one of the names: the last block that does, or else the text.

    What it uses and does not define is taken from earlier blocks (imports, functions, classes). It
    runs after the prefix's imports and helpers. A text or block that is only the body of the
    prefix's last function continues the prefix. None: there is no code.
    """
    text = final_text(completion)
    fenced = blocks(text)
    python = [code for language, code in fenced if language in PYTHON and code.strip()]
    choices = python if fenced else [text.replace("\r\n", "\n")]
    trees = [(code, parsed(code)) for code in choices]
    for place in reversed(range(len(trees))):
        code, tree = trees[place]
        if tree is not None and any(name in defined(tree) for name in names):
            earlier = [one for _, one in trees[:place] if one is not None]
            return Code(text=code, before=helpers(prefix, names) + _missing(tree, earlier))
    if prefix:
        for code in reversed(choices):
            body = continuation(code, prefix)
            if body:
                return Code(text=body)
    if not fenced:
        return Code(text=text) if is_program(trees[0][1]) else None
    broken = [code for code, tree in trees if tree is None]
    naming = [code for code in broken if any(name in code for name in names)]
    if naming or (broken and len(broken) == len(trees)):
        code = (naming or broken)[-1]
        return Code(text=code, problem=problem_of(code))
    programs = [code for code, tree in trees if is_program(tree)]
    return Code(text=programs[-1], before=helpers(prefix, names)) if programs else None


def _missing(tree: ast.Module, earlier: list[ast.Module]) -> str:
    """Statements of earlier blocks that bind what a program uses and does not bind."""
    taken: list[ast.stmt] = []
    known = set(dir(builtins)) | set(defined(tree))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for module in reversed(earlier):
        for name, node in reversed(defined(module).items()):
            if name in used - known and isinstance(node, kinds):
                known.add(name)
                used |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                taken.append(node)
    taken = list(dict.fromkeys(reversed(taken)))
    taken.sort(key=lambda node: not isinstance(node, ast.Import | ast.ImportFrom))
    return "".join(ast.unparse(node) + "\n" for node in taken)


def helpers(prefix: str, names: tuple[str, ...]) -> str:
    """The prefix without the functions that the program is to define, and without its main part."""
    tree = parsed(prefix) or parsed(prefix.rstrip() + "\n    pass\n")
    if tree is None:
        return ""
    kept = [node for node in tree.body if getattr(node, "name", None) not in names]
    return "".join(ast.unparse(node) + "\n" for node in kept)


def continuation(code: str, prefix: str) -> str:
    """The prefix with a body for its last function, or "" where the code is none.

    What comes after the body and is no Python, such as prose, is left out.
    """
    code = code.strip("\n") + "\n"
    indented = textwrap.indent(textwrap.dedent(code), "    ")
    stop = re.search(r"^[^\s#]", code, re.MULTILINE)
    cut = code[: stop.start()] if stop and stop.start() else ""
    before = parsed(prefix) or parsed(prefix.rstrip() + "\n    pass\n")
    if before is None or not before.body:
        return ""
    place = len(before.body) - 1
    for body in (code, cut, indented):
        tree = parsed(prefix.rstrip() + "\n" + body) if body.strip() else None
        if tree is None or len(tree.body) <= place or not hasattr(tree.body[place], "body"):
            continue
        own = tree.body[place].body[1 if ast.get_docstring(tree.body[place]) is not None else 0 :]
        if any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in own):
            return prefix.rstrip() + "\n" + body
    return ""
