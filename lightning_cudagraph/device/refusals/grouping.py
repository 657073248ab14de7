"""The grouping of findings: those that one change of the user's code settles are put into one."""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable
from dataclasses import replace

from lightning_cudagraph.errors import Finding, first_of

# What may differ between findings that one change of a line settles: names, texts and numbers.
_NAMED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|-?\d[\d.e+-]*")
_MAX_NAMED = 5
# The end of a remedy that allows what was found.
_ALLOWANCE = re.compile(
    r" If nothing depends on it, [^:]*: `CUDAGraphCallback\(harmless=\[([^]]*)]\)`\."
)


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Put findings on one line into one that differ in a name or a number alone, or have one remedy."""
    groups: dict[Hashable, list[Finding]] = {}
    for finding in _without_echoes([*findings]):
        texts = (_NAMED.sub("", text) for text in (finding.what, finding.remedy))
        groups.setdefault((*texts, finding.place, finding.in_optimizer), []).append(finding)
    merged: dict[Hashable, Finding] = {}
    for finding in _without_parts([_in_one(group) for group in groups.values()]):
        key = (finding.place, finding.remedy, finding.in_optimizer) if finding.location else finding.key
        first = merged.setdefault(key, finding)
        if first is not finding:
            merged[key] = replace(first, what=f"{first.what} {finding.what}")
    return [*merged.values()]


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Leave out what has no line, and is the backward pass of what was found at one."""
    found = tuple(each.what.removesuffix(".") for each in findings if each.location)
    return [each for each in findings if each.location or not each.what.startswith(found)]


def _without_parts(findings: list[Finding]) -> list[Finding]:
    """Leave out what is a part of another finding on its line, and settled with it.

    A call, or a statement that sets an item, leaves the step with all that it reads; to allow it is to
    allow these too, if that can be. An attribute may have a tensor in place of the number that is read
    of it.
    """
    kinds = {id(finding): _kind_of_line(finding) for finding in findings}
    reads: dict[tuple[str, int], list[Finding]] = {}
    for finding in findings:
        if not finding.is_effect:
            reads.setdefault(finding.place, []).append(finding)
    effects = {finding.place for finding in findings if finding.is_effect}

    def is_part(finding: Finding) -> bool:
        kind, line = kinds[id(finding)], finding.place
        if finding.is_effect:
            return kind == "attribute" and line in reads
        return kind == "leaves" and line in effects

    def with_parts(finding: Finding) -> Finding:
        is_whole = finding.is_effect and kinds[id(finding)] == "leaves"
        parts = reads.get(finding.place, []) if is_whole else []
        allowed = [_ALLOWANCE.search(each.remedy) for each in (finding, *parts)]
        if all(allowed):
            names = ", ".join(dict.fromkeys(found[1] for found in allowed if found))
            remedy = _ALLOWANCE.sub(lambda own: own[0].replace(own[1], names), finding.remedy)
        else:
            remedy = _ALLOWANCE.sub("", finding.remedy)
        return replace(finding, remedy=remedy) if parts else finding

    return [with_parts(finding) for finding in findings if not is_part(finding)]


def _kind_of_line(finding: Finding) -> str:
    """The kind of a line: "leaves" for a call or a set item, "attribute" for a set attribute."""
    try:
        (statement,) = ast.parse(finding.location.source if finding.location else "").body
    except (SyntaxError, ValueError):  # a part of a statement, or several
        return ""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    if all(isinstance(target, ast.Attribute) for target in targets):
        return "attribute"
    is_item = all(isinstance(target, ast.Subscript) for target in targets)
    return "leaves" if is_item or isinstance(statement, ast.Expr) else ""


def _in_one(group: list[Finding]) -> Finding:
    """One finding for several on a line: the first name that differs stands for each of them."""
    first, *others = group
    if not others:
        return first
    names = [_NAMED.findall(finding.what) for finding in group]
    differ = next((each for each in zip(*names, strict=True) if len({*each}) > 1), ())
    listed = [*dict.fromkeys(differ)]
    shown = first_of(listed[1:], _MAX_NAMED - 1)
    remedy = first.remedy
    if listed and (own := f'["{listed[0][1:-1]}"]') in remedy:
        remedy = remedy.replace(own, str([name[1:-1] for name in listed]).replace("'", '"'))
    return replace(
        first, what=f"{first.what} So too with {shown}." if shown else first.what, remedy=remedy
    )
