"""Single changes of Python source, as a programmer's mistakes: the operators of the campaign.

`sites` returns every change that the operators can make in one file. A change replaces one range of
the file's text, so that the rest stays byte for byte as it is.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

__all__ = [
    "OPERATORS",
    "Mutation",
    "declared_defaults",
    "option_defaults",
    "own_lines",
    "sampled",
    "sites",
]

OPERATORS: Mapping[str, str] = {
    "drop-call": "a statement that is a call is left out",
    "drop-raise": "an error is not raised",
    "swap-operands": "the two sides of -, /, //, %, **, @, << or >> change places",
    "compare-direction": "< becomes > and min becomes max, and the other way round",
    "off-by-one": "an integer, or the bound of a slice, a range or a comparison, is off by one",
    "constant-option": "an option's default stands in place of a read of the option",
    "dtype": "a dtype is replaced by one that is wider or narrower",
    "negate": "a condition is negated",
    "keep-state": "state is not reset: an assignment of nothing, or `clear`, is left out",
    "ignore-argument": "an argument is not passed on, or its default is used whatever is given",
    "swap-statements": "two statements in sequence change places",
    "rank-zero-alone": "only rank 0 takes part in a collective",
    "loop-edge": "a loop sees its first or its last element alone, a sum its last term",
}

_RANK_ZERO = 'int(__import__("os").environ.get("RANK", "0")) == 0'
_COLLECTIVE = re.compile(
    r"all_reduce|all_gather|reduce_scatter|all_to_all|barrier|together|"
    r"broadcast(?!_to|_tensors|_shapes)|^(send|recv|isend|irecv|batch_isend_irecv)$"
)
_LOGS = re.compile(r"^(log|logger|logging|warnings|_log|_logger)\.|^(print|warn)$")
_RESETS = re.compile(r"^(clear|zero_|zero_grad|_zero_grad|reset\w*|_reset\w*)$")
_DTYPES: Mapping[str, tuple[str, ...]] = {
    "float32": ("bfloat16", "float64"),
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "float64": ("float32",),
}
_CASTS = {"float": "bfloat16", "double": "float", "bfloat16": "float", "half": "float"}
_ORDER: Mapping[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OTHER_BOUND = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_NOT_COMMUTATIVE: Mapping[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
# Methods that change their object although their result is assigned.
_CHANGES = re.compile(r"_$|^(pop\w*|setdefault|next\w*|send|recv|submit|draw\w*|step)$")
# Arguments by which a call does the same thing: texts for people, the layout of a text, the check
# of an assumption, and whether a copy waits.
_SAME_RESULT = ("why", "remedy", "indent", "sort_keys", "strict", "non_blocking")
# An integer of a module or a class from here on is a size or a time that someone chose.
_CHOSEN = 100
# Fields of nodes whose text decides nothing at run time, or only how an object is shown.
_NOT_MUTATED = ("annotation", "returns", "decorator_list", "bases", "type_params")
_SHOWN = ("__repr__", "__str__", "__rich_repr__")
_MODULES = ("torch", "dist", "math", "os", "F")
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One change of one file.

    Attributes:
        file: path of the file below the folder of its package's parent.
        line, column: place of the changed node, from 1 and from 0.
        operator: a name in `OPERATORS`.
        ordinal: index among the changes that this operator makes at this place.
        function: qualified name of the function or class around it; empty at module level.
        imported: True if the node runs when the module is imported.
        lines: the first and the last line of the statement around it, or of its head.
        start, end: byte offsets of the text that is replaced.
        text: the replacement.
        before, after: the changed lines before and after, each as one line.
        name: the name of a change that was written by hand, or "".
        world: the number of ranks at which it shows; 0 if it is not known.
    """

    file: str
    line: int
    column: int
    operator: str
    ordinal: int
    function: str
    imported: bool
    lines: tuple[int, int]
    start: int
    end: int
    text: str
    before: str
    after: str
    name: str = ""
    world: int = 0

    @property
    def place(self) -> str:
        """The name of the change within its package."""
        return self.name or f"{self.file}:{self.line}:{self.column}:{self.operator}:{self.ordinal}"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The name of the change that stays when lines above it come and go."""
        return (self.file, self.function, self.operator, self.before, self.after)

    def apply(self, source: str) -> str:
        """Return the changed source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def sites(source: str, file: str, defaults: Mapping[str, Mapping[str, str]]) -> list[Mutation]:
    """Return every change that the operators can make, in the order of the source.

    Changes that do not compile, and the second of two that give the same text, are left out.

    Args:
        source: the text of the file.
        file: its name in the result.
        defaults: see `option_defaults`.
    """
    finder = _Finder(source, file, defaults)
    finder.block(ast.parse(source).body)
    seen = {hashlib.sha256(source.encode()).digest()}
    found: list[Mutation] = []
    for one in sorted(finder.found, key=lambda m: (m.line, m.column, m.operator, m.ordinal)):
        changed = one.apply(source)
        digest = hashlib.sha256(changed.encode()).digest()
        if digest not in seen and _compiles(changed, file):
            seen.add(digest)
            found.append(one)
    return found


def _compiles(source: str, file: str) -> bool:
    try:
        compile(source, file, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def option_defaults(*classes: type) -> dict[str, dict[str, str]]:
    """Return the source text of the defaults of dataclasses' fields, by section and field.

    A section is the last word of the class's name in lower case (``Memory`` is ``memory``,
    ``OptimizerConfig`` is ``optimizer``). Fields whose default cannot be written as a literal are
    left out.
    """
    found: dict[str, dict[str, str]] = {}
    for cls in classes:
        words = re.findall("[A-Z][a-z]*", cls.__name__.removesuffix("Config"))
        section = "options" if cls.__name__.endswith("Options") else (words or ["config"])[-1]
        section = {"source": "model", "engine": "config"}.get(section.lower(), section.lower())
        values = found.setdefault(section, {})
        for one in dataclasses.fields(cls):
            value: Any = one.default
            if one.default_factory is not dataclasses.MISSING:
                value = one.default_factory()
            if isinstance(value, (bool, int, float, str, tuple, type(None), dict)):
                values[one.name] = repr(value)
    return found


def declared_defaults(source: str) -> list[tuple[str, str]]:
    """Return the fields of the options' classes in a source (``…Options``) with their defaults."""
    return [
        (field.target.id, ast.unparse(field.value))
        for one in ast.parse(source).body
        if isinstance(one, ast.ClassDef) and one.name.endswith("Options")
        for field in one.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.value, ast.Constant)
    ]


def sampled(found: Sequence[Mutation], seed: int, count: int | None = None) -> list[Mutation]:
    """Return the changes in a seeded order whose every prefix is spread over the operators.

    Each operator's share of a prefix is its share of the whole. The order depends on the seed and
    on the changes alone.
    """
    strata: dict[str, list[Mutation]] = {}
    for one in found:
        strata.setdefault(one.operator, []).append(one)
    placed: list[tuple[float, str, Mutation]] = []
    for operator, members in sorted(strata.items()):
        # A text as the seed is hashed the same way on every machine.
        random.Random(f"{seed} {operator}").shuffle(members)
        placed += [((i + 0.5) / len(members), operator, one) for i, one in enumerate(members)]
    ordered = [one for _, _, one in sorted(placed, key=lambda item: item[:2])]
    return ordered[:count]


class _Finder:
    """The changes of one file, gathered on a walk through its syntax tree."""

    def __init__(self, source: str, file: str, defaults: Mapping[str, Mapping[str, str]]) -> None:
        self.found: list[Mutation] = []
        self._data = source.encode()
        self._file = file
        self._defaults = defaults
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[ast.AST] = []
        self._lines = (1, 1)
        # Collectives that are a whole statement.
        self._guarded: list[ast.Call] = []
        # Differences whose sign decides nothing.
        self._unsigned: list[ast.AST] = []

    # --- text ----------------------------------------------------------------------------------

    def _start(self, node: Any) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: Any) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _add(
        self, operator: str, node: Any, text: str, *, last: Any = None, world: int = 0
    ) -> None:
        end = self._end(last or node)
        self._replace(operator, node, self._start(node), end, text, world=world)

    def _replace(
        self, operator: str, node: Any, start: int, end: int, text: str, *, world: int = 0
    ) -> None:
        place = (node.lineno, node.col_offset, operator)
        ordinal = sum((m.line, m.column, m.operator) == place for m in self.found)
        left = self._data.rfind(b"\n", 0, start) + 1
        right = self._data.find(b"\n", end)
        right = len(self._data) if right < 0 else right
        before = self._data[left:right].decode()
        after = (self._data[left:start] + text.encode() + self._data[end:right]).decode()
        inside = any(isinstance(one, (ast.FunctionDef, ast.Lambda)) for one in self._scope)
        self.found.append(
            Mutation(
                file=self._file,
                line=node.lineno,
                column=node.col_offset,
                operator=operator,
                ordinal=ordinal,
                function=".".join(getattr(one, "name", "<lambda>") for one in self._scope),
                imported=not inside,
                lines=self._lines,
                start=start,
                end=end,
                text=text,
                before=" ".join(before.split()),
                after=" ".join(after.split()),
                world=world,
            )
        )

    # --- the walk ------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Walk through the statements of a block."""
        for first, second in pairwise(body):
            self._swap_statements(first, second)
        for one in body:
            self._statement(one)

    def _statement(self, node: ast.stmt) -> None:
        if _is_left_out(node):
            return
        self._lines = own_lines(node)
        if isinstance(node, ast.Raise):
            if node.exc is not None:
                self._add("drop-raise", node, "pass")
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self._definition(node)
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call_statement(node, node.value)
        if isinstance(node, (ast.If, ast.While)):
            self._negate(node.test)
        if isinstance(node, ast.For):
            self._loop(node.iter)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            last = f"{self._text(node.target)} = {self._text(node.value)}"
            self._add("loop-edge", node, last)
        if self._is_reset(node):
            self._add("keep-state", node, "pass")
        self._parts(node)

    def _parts(self, node: ast.stmt) -> None:
        """Walk through the expressions and the blocks of a statement."""
        lines = self._lines
        for name, value in ast.iter_fields(node):
            if name in _NOT_MUTATED:
                continue
            children = value if isinstance(value, list) else [value]
            self.block([child for child in children if isinstance(child, ast.stmt)])
            self._lines = lines
            for child in children:
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                    self._expression(child)
                    self._lines = lines

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._lines = own_lines(node)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._expression(default)
        self._scope.append(node)
        if isinstance(node, ast.FunctionDef):
            self._parameters(node)
        self.block(node.body)
        self._scope.pop()

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            # Its parts have no exact places, and are texts for people.
            return
        if isinstance(node, ast.ExceptHandler):
            self.block(node.body)
            return
        if isinstance(node, ast.match_case):
            if node.guard is not None:
                self._expression(node.guard)
            self.block(node.body)
            return
        if isinstance(node, ast.Call) and _LOGS.search(ast.unparse(node.func)):
            return
        self._mutate(node)
        if isinstance(node, ast.Lambda):
            self._scope.append(node)
            self._expression(node.body)
            self._scope.pop()
            return
        if isinstance(node, ast.keyword) and node.arg in _SAME_RESULT:
            return
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "cast",
            "TypeVar",
            "isinstance",
        ):
            children = node.args[1:] if ast.unparse(node.func) == "cast" else node.args[:1]
        for child in children:
            self._expression(child)

    def _mutate(self, node: ast.AST) -> None:
        self._unsigned += _operands_without_sign(node)
        match node:
            case ast.BinOp():
                self._binary(node)
            case ast.Compare():
                self._compare(node)
            case ast.Constant():
                self._constant(node)
            case ast.Subscript():
                self._subscript(node)
            case ast.Attribute():
                self._attribute(node)
            case ast.Call():
                self._call(node)
            case ast.IfExp():
                self._negate(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    self._negate(test)
                self._loop(node.iter)
            case _:
                pass

    # --- operators -----------------------------------------------------------------------------

    def _call_statement(self, node: ast.Expr, call: ast.Call) -> None:
        name = _last_name(call.func)
        if not _RESETS.match(name):
            self._add("drop-call", node, "pass")
        if _COLLECTIVE.search(name):
            self._guarded.append(call)
            alone = f"({self._text(node)}) if {_RANK_ZERO} else None"
            self._add("rank-zero-alone", node, alone, world=2)

    def _is_reset(self, node: ast.stmt) -> bool:
        """Return whether a statement, outside of a constructor, makes state empty."""
        functions = [one.name for one in self._scope if isinstance(one, ast.FunctionDef)]
        if not functions or functions[-1] in ("__init__", "__post_init__"):
            return False
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return bool(_RESETS.match(_last_name(node.value.func)))
        if isinstance(node, ast.Assign):
            return not isinstance(node.targets[0], ast.Name) and _is_nothing(node.value)
        return False

    def _binary(self, node: ast.BinOp) -> None:
        sign = _NOT_COMMUTATIVE.get(type(node.op))
        text = isinstance(node.left, (ast.Constant, ast.JoinedStr)) and isinstance(
            getattr(node.left, "value", ""), str
        )
        if sign and not text and node not in self._unsigned:
            left, right = self._text(node.left), self._text(node.right)
            self._add("swap-operands", node, f"(({right}) {sign} ({left}))")

    def _compare(self, node: ast.Compare) -> None:
        if len(node.ops) != 1 or (sign := _ORDER.get(type(node.ops[0]))) is None:
            return
        left, right = self._text(node.left), self._text(node.comparators[0])
        self._add("compare-direction", node, f"(({left}) {_TURNED[sign]} ({right}))")
        self._add("off-by-one", node, f"(({left}) {_OTHER_BOUND[sign]} ({right}))")

    def _constant(self, node: ast.Constant) -> None:
        inside = any(not isinstance(one, ast.ClassDef) for one in self._scope)
        if type(node.value) is int and (inside or node.value < _CHOSEN):
            self._add("off-by-one", node, str(node.value + 1))
            if node.value > 0:
                self._add("off-by-one", node, str(node.value - 1))
        if isinstance(node.value, str):
            for other in _DTYPES.get(node.value, ()):
                self._add("dtype", node, repr(other).replace("'", '"'))

    def _subscript(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                if part.lower is not None:
                    self._bound(part.lower, "+ 1")
                if part.upper is not None:
                    self._bound(part.upper, "- 1")

    def _bound(self, node: ast.expr, change: str) -> None:
        if isinstance(node, ast.Constant) or _is_negative(node):
            # As an integer it has its own changes.
            return
        self._add("off-by-one", node, f"({self._text(node)}) {change}")

    def _attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if ast.unparse(node.value) == "torch":
            for other in _DTYPES.get(node.attr, ()):
                self._add("dtype", node, f"torch.{other}")
        section = _last_name(node.value).removeprefix("_").removesuffix("_config")
        default = self._defaults.get(section, {}).get(node.attr)
        if default is not None:
            self._add("constant-option", node, f"({default})")

    def _call(self, node: ast.Call) -> None:
        name = _last_name(node.func)
        if isinstance(node.func, ast.Name) and name in ("min", "max"):
            other = "max" if name == "min" else "min"
            self._add("compare-direction", node.func, other)
        if isinstance(node.func, ast.Name) and name == "range":
            for argument in node.args:
                self._bound(argument, "- 1")
        if isinstance(node.func, ast.Attribute) and name in _CASTS and not node.args:
            self._add("dtype", node, f"{self._text(node.func.value)}.{_CASTS[name]}()")
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in _SAME_RESULT:
                fewer = copy.deepcopy(node)
                del fewer.keywords[index]
                self._add("ignore-argument", node, ast.unparse(fewer))
        if _COLLECTIVE.search(name) and node.args and node not in self._guarded:
            alone = self._text(node.args[0])
            if "gather" in name:
                alone = f"[{alone}]"
            if name == "together":
                alone = f"[({self._text(node.args[1])})()]"
            alone = f"({self._text(node)} if {_RANK_ZERO} else {alone})"
            self._add("rank-zero-alone", node, alone, world=2)

    def _negate(self, test: ast.expr) -> None:
        self._add("negate", test, f"not ({self._text(test)})")
        if isinstance(test, ast.BoolOp):
            for part in test.values:
                self._add("negate", part, f"(not ({self._text(part)}))")

    def _loop(self, iterated: ast.expr) -> None:
        for part in ("[:1]", "[-1:]"):
            self._add("loop-edge", iterated, f"list(({self._text(iterated)})){part}")

    def _parameters(self, node: ast.FunctionDef) -> None:
        body = [one for one in node.body if not _is_text(one)]
        if not body or body[0].lineno == node.lineno:
            return
        self._lines = own_lines(body[0])
        positional = [*node.args.posonlyargs, *node.args.args]
        pairs = list(zip(positional[::-1], node.args.defaults[::-1], strict=False))
        pairs += [
            (a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d
        ]
        at = self._start(body[0])
        for argument, default in pairs:
            if not _decides(argument.arg, body):
                continue
            line = f"{argument.arg} = {ast.unparse(default)}\n{' ' * body[0].col_offset}"
            self._replace("ignore-argument", argument, at, at, line)

    def _swap_statements(self, first: ast.stmt, second: ast.stmt) -> None:
        if not isinstance(first, _SIMPLE) or not isinstance(second, _SIMPLE):
            return
        if not self._scope or _is_text(first) or _is_text(second):
            return
        # A name that the second reads, and only the first has set, would be an error at once.
        stored = {one.id for one in ast.walk(first) if _is_stored(one)}
        if stored & _names(second) and not isinstance(first, ast.AugAssign):
            return
        both = all(_COLLECTIVE.search(ast.unparse(one)) for one in (first, second))
        if not (
            both or _meet(_touched(first), _names(second)) or _meet(_touched(second), _names(first))
        ):
            return
        self._lines = (first.lineno, second.end_lineno or second.lineno)
        between = self._data[self._end(first) : self._start(second)].decode()
        text = f"{self._text(second)}{between}{self._text(first)}"
        self._add("swap-statements", first, text, last=second)


def _is_left_out(node: ast.stmt) -> bool:
    """Return whether a statement decides nothing, or only what is logged or shown."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert)) or _is_text(node):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]).startswith("__")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return bool(_LOGS.search(ast.unparse(node.value.func)))
    return isinstance(node, ast.FunctionDef) and node.name in _SHOWN


def _operands_without_sign(node: ast.AST) -> list[ast.expr]:
    """Return the operands of which a node takes the absolute value or the square."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "abs":
        return node.args
    if isinstance(node, ast.Attribute) and node.attr in ("abs", "square"):
        return [node.value]
    return []


def _decides(argument: str, body: Sequence[ast.stmt]) -> bool:
    """Return whether a body reads an argument for more than to delete it or to assert something."""
    return any(
        isinstance(one, ast.Name) and one.id == argument and isinstance(one.ctx, ast.Load)
        for statement in body
        if not isinstance(statement, ast.Assert)
        for one in ast.walk(statement)
    )


def own_lines(node: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement, without the blocks in it."""
    blocks = [
        value[0].lineno
        for _, value in ast.iter_fields(node)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt)
    ]
    last = min(blocks) - 1 if blocks else node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, last)


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _names(node: ast.AST) -> set[str]:
    """Return the dotted names in a statement, each as long as it goes, without modules'."""
    if isinstance(node, (ast.Name, ast.Attribute)) and (name := _dotted(node)):
        return set() if name.partition(".")[0] in _MODULES else {name}
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}


def _dotted(node: ast.AST) -> str:
    """Return the text of a name with dots, or "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def _touched(node: ast.stmt) -> set[str]:
    """Return the names of the objects that a statement sets, or may change.

    A call whose result becomes a local name is taken to change nothing, unless its name says so.
    """
    local = isinstance(node, ast.Assign) and all(
        isinstance(name, ast.Name)
        for target in node.targets
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
    )
    touched: set[str] = set()
    for one in ast.walk(node):
        named = isinstance(one, (ast.Name, ast.Attribute, ast.Subscript))
        if named and not isinstance(one.ctx, ast.Load):
            touched |= _names(one.value if isinstance(one, ast.Subscript) else one)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            changes = not local or _CHANGES.search(one.func.attr)
            touched |= _names(one.func.value) if changes else set()
        if isinstance(one, ast.keyword) and one.arg == "generator":
            touched |= _names(one.value)
    if isinstance(node, ast.Expr):
        touched |= _names(node)
    return touched


def _meet(touched: set[str], names: set[str]) -> bool:
    """Return whether one of the names is, contains or is a part of a touched object."""
    return any(
        f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in touched for b in names
    )


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, (str, type(...)))
    )


def _is_negative(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _is_nothing(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) and not node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return ast.unparse(node) in ("set()", "dict()", "list()")


def _last_name(node: ast.AST) -> str:
    """Return the last name of a dotted expression, or "" for any other."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
