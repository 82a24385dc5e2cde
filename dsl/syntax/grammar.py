"""Compiles expr.lark to expr_table.py, by `python -m kvpolicy.dsl.syntax.grammar`.

Building the parser and importing Lark take longer than everything else that `kvpolicy check` does,
so the LALR tables are made ahead of time. A test compares them with a fresh build and compares the
trees of `expression.py` with Lark's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lark import Lark
from lark.lexer import PatternStr

GRAMMAR = Path(__file__).with_name("expr.lark")
TABLE = Path(__file__).with_name("expr_table.py")

HEADER = '''"""LALR tables of expr.lark (`python -m kvpolicy.dsl.syntax.grammar`); do not edit."""

# fmt: off
# ruff: noqa: E501
'''


def build_lark() -> Lark:
    """The grammar as a Lark parser: the definition that the tables must agree with."""
    return Lark(GRAMMAR.read_text(encoding="utf-8"), parser="lalr", lexer="basic")


def generate() -> str:
    """Text of `expr_table.py`."""
    lark = build_lark()
    lines = [HEADER]
    for name, value in {**_lexer(lark), **_tables(lark)}.items():
        if isinstance(value, list):
            rows = "".join(f"    {_literal(row)},\n" for row in value)
            lines.append(f"{name} = [\n{rows}]\n")
        else:
            lines.append(f"{name} = {_literal(value)}\n")
    return "".join(lines)


def _literal(value: Any) -> str:
    return repr(value) if not isinstance(value, str) else json.dumps(value)


def _lexer(lark: Lark) -> dict[str, Any]:
    """PATTERN with one group per terminal, KEYWORDS that look like names, LITERALS for messages."""
    ignored = set(lark.ignore_tokens)
    strings = {t.name: t.pattern.value for t in lark.terminals if isinstance(t.pattern, PatternStr)}
    keywords = {text: name for name, text in strings.items() if text.isidentifier()}
    signs = [t for t in lark.terminals if t.name in strings and strings[t.name] not in keywords]
    patterns = [t for t in lark.terminals if t.name not in strings]
    # As Lark orders them: patterns that can match more come first.
    ordered = sorted(patterns + signs, key=lambda t: (-t.pattern.max_width, t.name))
    groups = [
        f"(?P<{'IGNORED' if t.name in ignored else t.name}>{t.pattern.to_regexp()})"
        for t in ordered
    ]
    return {"PATTERN": "|".join(groups), "KEYWORDS": keywords, "LITERALS": strings}


def _tables(lark: Lark) -> dict[str, Any]:
    """RULES, ACTIONS and GOTOS, with states numbered in the order in which they are reached."""
    table = lark.parser.parser._parse_table
    rules = list(lark.rules)
    number = {table.start_states["start"]: 0}
    queue = [table.start_states["start"]]
    for state in queue:
        for _symbol, (action, target) in sorted(table.states[state].items()):
            if action.name == "Shift" and target not in number:
                number[target] = len(number)
                queue.append(target)
    terminals = {t.name for t in lark.terminals} | {"$END"}
    actions, gotos = [], []
    for state in queue:
        row: dict[str, int] = {}
        jumps: dict[str, int] = {}
        for symbol, (action, target) in sorted(table.states[state].items()):
            if action.name != "Shift":
                row[symbol] = -1 - rules.index(target)
            elif symbol in terminals:
                row[symbol] = number[target]
            else:
                jumps[symbol] = number[target]
        actions.append(row)
        gotos.append(jumps)
    return {
        "RULES": [_rule(rule) for rule in rules],
        "ACTIONS": actions,
        "GOTOS": gotos,
        "END": number[table.end_states["start"]],
    }


def _rule(rule: Any) -> tuple[str, str, bool, tuple[bool, ...]]:
    """What the rule makes, its name in the tree, whether one child stands for it, what it keeps."""
    kept = tuple(not (s.is_term and s.filter_out) for s in rule.expansion)
    name = rule.alias or rule.origin.name
    return str(rule.origin.name), str(name), rule.options.expand1 and not rule.alias, kept


if __name__ == "__main__":
    TABLE.write_text(generate(), encoding="utf-8")
