"""Makes the mutants of a module, by cosmic-ray's operators."""

from __future__ import annotations

import ast
import difflib
import re
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

LEFT_OUT = re.compile(
    r"ReplaceComparisonOperator_(\w+_Is|\w+_IsNot|Is_\w+|IsNot_\w+)$"  # but for those below
    r"|ReplaceBinaryOperator_(\w+_)?(RShift|LShift|BitOr|BitAnd|BitXor)(_\w+)?$"
)
KEPT = re.compile(r"ReplaceComparisonOperator_(Is_IsNot|IsNot_Is)$")


class Mutant(NamedTuple):
    """One change: `code` is the module with it, `lines` its statement, None outside a function."""

    operator: str
    line: int
    before: str
    after: str
    lines: tuple[int, int] | None
    code: str


def mutants_of(source: str) -> list[Mutant]:
    """Return every mutant whose program differs from the module's and from the others'.

    Annotations are no program. Identity is only turned round, and no comparison becomes one, as
    `is` and `==` are the same for None and for the members of an enumeration. Arithmetic is not
    turned into operations on bits, which fail at once on floats and would flatter the tests.
    """
    seen = {_program(source)}
    found = []
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        short = name.rpartition("/")[2]
        kind = get_operator(name)
        if kind.arguments() or (LEFT_OUT.match(short) and not KEPT.match(short)):
            continue
        places = [place for node in nodes for place in kind().mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            code = mutate_code(source, kind(), occurrence)
            try:
                program = None if code is None else _program(code)
            except SyntaxError:  # a change of text that is no program
                continue
            if code is None or program is None or program in seen:
                continue
            seen.add(program)
            before, after = _change(source, code)
            lines = _statement(source, start[0])
            found.append(Mutant(short, start[0], before, after, lines, code))
    return found


class _Bare(ast.NodeTransformer):
    """Takes annotations away."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _program(source: str) -> str:
    return ast.dump(_Bare().visit(ast.parse(source)))


def _change(source: str, code: str) -> tuple[str, str]:
    """Return the lines that a change takes away and those that it puts there."""
    delta = list(difflib.ndiff(source.splitlines(), code.splitlines()))
    taken, put = (
        " ".join(line[2:].strip() for line in delta if line.startswith(sign)) for sign in "-+"
    )
    return taken, put


def _statement(source: str, line: int) -> tuple[int, int] | None:
    """Return the lines of the innermost statement around a line, None outside of functions."""
    inside = [
        node
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for body in function.body
        for node in ast.walk(body)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    if not inside:
        return None
    found = max(inside, key=lambda node: node.lineno)
    body = [one.lineno for one in getattr(found, "body", [])]
    last = min(body) - 1 if body else (found.end_lineno or line)
    return found.lineno, max(last, found.lineno)
