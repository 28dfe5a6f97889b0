"""A calculator for the model: the agent function (``engine_trainer.agent``) of calculator.yaml."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from engine_trainer.agent import Episode, Trajectory

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
LONGEST = 200
"""Largest number of characters in an expression and in a result."""
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def solve(episode: Episode) -> Trajectory:
    """Answer each finished turn with a ``<calc>expression</calc>`` with the expression's value.

    The model continues after such a turn, until a turn has none.
    """
    turn = await episode.generate()
    while turn.finished and (calls := CALL.findall(turn.text)):
        episode.info["calls"] = episode.info.get("calls", 0) + 1
        turn = await episode.generate([{"role": "tool", "content": calculate(calls[-1])}])
    return episode.end()


def calculate(expression: str) -> str:
    """Return the value of ``expression``: numbers, + - * / and brackets.

    Any other expression has the value ``error: …``.
    """
    try:
        value = _value(ast.parse(expression.strip()[:LONGEST], mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"
    return (str(value) if value.denominator == 1 else f"{float(value):g}")[:LONGEST]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / and brackets")
