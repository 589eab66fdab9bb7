"""Names and phrases of a checkout: names of classes, first words of docstrings, relative clauses in place of a noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from scripts.structure_source import Source

# Classes named by one word that is a participle, an adverb, a pronoun, a verb or an adjective.
_PARTICIPLE = re.compile(r"_?[A-Z][a-z]+(?:ed|ing)")
_NOUNS = re.compile(
    "Booking|Embed|Feed|Finding|Heading|Listing|Meaning|Need|Opening|Paging|Parsing|Posting|Pricing|Recording|Saving|Seed|Setting|"
    "Speed|String|Timing|Training|Warning"
)
_WORDS = re.compile(
    "About|Again|Alive|Anonymous|Before|Begun|Current|Drawn|Enough|Given|Gone|Held|Incoming|Kept|Known|Late|Lazily|Newest|Others?|"
    "Outside|Recent|Seen|Shown|Some|Spent|Stateless|Sticky|Such|Told|Unknown|Untaken|Volatile|Whole|Written"
)
_BEGINS = re.compile(r"(?:What|Whether|Of|Those)\b")
PHRASES = {
    "what is": r"what (?:has|is|was|are|were|it|they)",
    "those that": r"those (?:that|who|which|of)",
    "one that": r"ones? that",
    "whoever": r"(?:who|what|which|wher)ever",
}


def classes(source: Source) -> dict[str, list[str]]:
    """Name -> the files that define a class of this name."""
    found = dict[str, list[str]]()
    for file, node in source.nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(file)
    return found


def is_bare(name: str) -> bool:
    word = name.lstrip("_")
    return bool(_WORDS.fullmatch(word) or (_PARTICIPLE.fullmatch(word) and not _NOUNS.fullmatch(word)))


def docstrings_that_begin_badly(source: Source) -> list[tuple[str, str]]:
    return [
        (file, text.splitlines()[0])
        for file, node in source.nodes()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := (ast.get_docstring(node, clean=False) or "").strip())
        and _BEGINS.match(text)
    ]


def clauses(source: Source) -> dict[str, list[str]]:
    """Phrase -> the file of each use in a comment or a docstring."""
    patterns = {phrase: re.compile(rf"\b{words}\b", re.IGNORECASE) for phrase, words in PHRASES.items()}
    found: dict[str, list[str]] = {phrase: [] for phrase in PHRASES}
    for file, text in source.texts.items():
        prose = " ".join(" ".join(_prose(text)).split())
        for phrase, pattern in patterns.items():
            found[phrase] += [file] * len(pattern.findall(prose))
    return found


def _prose(text: str) -> Iterator[str]:
    """Comments, and the strings that stand alone."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
        elif token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""')):
            yield token.string
