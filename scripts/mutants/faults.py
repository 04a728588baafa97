"""Faults of one line: what can be planted where, and a sample of it."""

import ast
import copy
import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOMS = ("scalify_core", "trainer")
# The share of faults in numbers and operators of arithmetic, at least.
ARITHMETIC = 0.3
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMMUTATIVE = ("max", "min", "jnp.maximum", "jnp.minimum", "math.hypot")
# Messages may change freely; defaults of parameters are tested where they are used.
SKIPPED = ("Raise", "Assert", "JoinedStr")


class Fault(NamedTuple):
    """A line and what is planted in its place.

    It is kept by content: a file that changes elsewhere keeps its faults.

    Attributes:
      file: relative to the repository.
      line: its text.
      nth: among the file's lines of this text, from 0.
      planted: the text in its place.
      kind: number, operator, comparison, condition, argument or statement.
    """

    file: str
    line: str
    nth: int
    planted: str
    kind: str

    @property
    def name(self) -> str:
        """A short name that depends on nothing else."""
        return hashlib.sha256("\n".join(map(str, self)).encode()).hexdigest()[:10]

    @property
    def room(self) -> str:
        """The folder of its file: two levels of it at most."""
        return "/".join(Path(self.file).parts[:2])

    def line_number(self, text: str) -> int | None:
        """Return the number of its line in the file's text, or None if it is gone."""
        at = [i for i, line in enumerate(text.split("\n")) if line == self.line]
        return at[self.nth] + 1 if self.nth < len(at) else None

    def plant(self, text: str) -> str | None:
        """Return the file's text with the fault, or None if its line is gone."""
        number = self.line_number(text)
        if number is None:
            return None
        lines = text.split("\n")
        return "\n".join([*lines[: number - 1], self.planted, *lines[number:]])

    def is_code(self, root: Path) -> bool:
        """Return whether the file with the fault parses, and means something else."""
        text = (root / self.file).read_text(encoding="utf-8")
        planted = self.plant(text)
        try:
            return planted is not None and _meaning(planted) != _meaning(text)
        except SyntaxError:
            return False


def _meaning(text: str) -> str:
    return ast.dump(ast.parse(text))


def all_faults(root: Path) -> list[Fault]:
    """Return every fault that can be planted in the rooms, by file."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return [
        fault
        for path in files
        for fault in faults_of(
            path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        )
    ]


def faults_of(file: str, text: str) -> Iterator[Fault]:
    """Yield the faults of a file: of code that one line holds, without its messages,
    annotations and declarations.
    """
    lines = text.split("\n")
    for node in _code(ast.parse(text)):
        if node.lineno != node.end_lineno:
            continue
        number = node.lineno - 1
        # Offsets of the parser count bytes.
        line = lines[number].encode()
        nth = lines[:number].count(lines[number])
        for kind, changed in _changes(node):
            planted = (
                line[: node.col_offset]
                + ast.unparse(changed).encode()
                + line[node.end_col_offset :]
            )
            yield Fault(file, lines[number], nth, planted.decode(), kind)


def _code(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes whose value decides what a program computes."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or type(node).__name__ in SKIPPED:
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _code(node)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the kind of a change and the node with it."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.BinOp(op=op) if type(op) in SWAPPED:
            changed.op = SWAPPED[type(op)]()
            yield "operator", changed
        case ast.Constant(value=bool()):
            yield "condition", ast.Constant(not changed.value)
        case ast.Constant(value=int() | float()):
            yield "number", ast.Constant(changed.value + 1)
        case ast.UnaryOp(op=ast.USub()):
            yield "operator", changed.operand
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", changed.operand
        case ast.Compare(ops=[op, *_]) if type(op) in SWAPPED:
            changed.ops[0] = SWAPPED[type(op)]()
            yield "comparison", changed
        case ast.BoolOp():
            changed.op = SWAPPED[type(changed.op)]()
            yield "condition", changed
        case ast.Call(func=function, args=[first, second, *_]) if (
            not (isinstance(first, ast.Starred) or isinstance(second, ast.Starred))
            and ast.unparse(function) not in COMMUTATIVE
        ):
            changed.args[:2] = [second, first]
            yield "argument", changed
        case ast.Call(keywords=[*_, ast.keyword(arg=str())]):
            changed.keywords.pop()
            yield "argument", changed
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", ast.Pass()


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Return a sample of `all_faults`.

    Rooms take turns, and kinds within a room, so that none is left out. A room's turns
    grow with the root of its size, as large rooms repeat themselves. Numbers and
    operators get the share that `ARITHMETIC` asks for.
    """
    generator = random.Random(seed)
    faults = all_faults(root)
    rooms: dict[str, dict[str, list[Fault]]] = {}
    for fault in generator.sample(faults, len(faults)):
        rooms.setdefault(fault.room, {}).setdefault(fault.kind, []).append(fault)
    order = []
    for kinds in rooms.values():
        mixed = [
            fault
            for turn in itertools.zip_longest(*kinds.values())
            for fault in turn
            if fault is not None
        ]
        order += [(n / len(mixed) ** 0.5, fault) for n, fault in enumerate(mixed)]
    order.sort(key=lambda entry: entry[0])
    valid = (fault for _, fault in order if fault.is_code(root))
    chosen: list[Fault] = []
    others = count - math.ceil(ARITHMETIC * count)
    for fault in valid:
        is_arithmetic = fault.kind in ("number", "operator")
        if is_arithmetic or others:
            chosen.append(fault)
            others -= not is_arithmetic
        if len(chosen) == count:
            break
    return chosen
