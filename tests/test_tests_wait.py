"""Tests wait for conditions (``waiting.until``), never for a time.

No test's outcome depends on an idle machine. The sources of all tests are searched by shape. A
shape that is right all the same is listed below with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "time", "process_time"}
SHORT_S = 240.0
"""Seconds below which a wait is too short: a test of 5 s took 120 s beside two other suites."""

# The keys are a function (file::name) and a shape, the value is why the shape is right there.
EXCEPTIONS = {
    "packages/rollout-fp8/tests/sglang_fakes.py::_one": {
        "sleep": "a request that the scheduler does not know yet"
    },
    (
        "packages/rollout-fp8/tests/test_collective.py::"
        "test_a_store_that_a_receiver_does_not_reach_is_named_with_what_to_look_at"
    ): {"port": "the socket that has it is held to the end, so that no other process takes it"},
    "packages/rollout-fp8/tests/transport_processes.py::close": {
        "wait": "who does not end within it is killed"
    },
    "packages/rollout-fp8/tests/transport_peers.py::buckets": {"sleep": "a receiver that is late"},
    "packages/trainer/tests/helpers/agent_parts.py::generate": {
        "sleep": "a model that takes its time"
    },
    "packages/trainer/tests/run/test_interrupt.py::press": {
        "sleep": "two presses within a second are one to the product"
    },
    "packages/trainer/tests/run/test_interrupt.py::test_one_press_ends_the_step_and_saves": {
        "sleep": "nothing tells outside that the press was heard"
    },
    "packages/trainer/tests/telemetry/test_logs.py::test_phases_add_up_and_begin_anew": {
        "sleep": "a phase that takes at least so long, which is all that is asserted"
    },
    (
        "packages/trainer/tests/placement/ray/test_ray_agent_rollouts.py::"
        "test_a_turn_that_nobody_waits_for_any_more_is_dropped"
    ): {"sleep": "a model that takes longer than its caller waits"},
    "packages/trainer/tests/rewards/test_model_reward.py::slow": {
        "wait": "a model that takes its time, until the test sets it free"
    },
    "packages/trainer/tests/rl/test_stream.py::ready": {
        "sleep": "a pool that waits for its replicas"
    },
    "packages/trainer/tests/rl/test_stream.py::unfinished": {
        "sleep": "a replica that takes its time"
    },
}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each function with its name, and the code outside of functions as ``module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
    yield (
        "module",
        ast.Module(body=[n for n in tree.body if not isinstance(n, DEFINITIONS)], type_ignores=[]),
    )


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def own(node: ast.AST, *, without: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """Yield the nodes in ``node``, without functions and classes inside it and their contents.

    Nodes of the kinds ``without`` and their contents are left out as well.
    """
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DEFINITIONS) and not isinstance(child, without or ()):
            yield child
            yield from own(child, without=without)


def called(node: ast.AST, *names: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
    )


def takes_no_time_or_for_ever(seconds: ast.expr) -> bool:
    """Return whether a sleep only yields to other threads, or has to be ended from outside."""
    if isinstance(seconds, ast.Constant) and isinstance(seconds.value, int | float):
        return seconds.value == 0 or seconds.value >= 600
    return isinstance(seconds, ast.Name) and seconds.id == "NEVER_S"


def sleeps(function: ast.AST) -> Iterator[ast.AST]:
    """Yield sleeps outside of a loop that looks for a condition: it may not hold yet afterwards."""
    for node in own(function, without=(ast.While,)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
            if takes_no_time_or_for_ever(node.args[0]):
                continue
            yield node


def is_elapsed(node: ast.AST, names: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and called(part.left, *CLOCKS)
        ):
            return True
    return False


def bounds(function: ast.AST) -> Iterator[ast.AST]:
    """Yield assertions that something took less than some time."""
    names: set[str] = set()
    for node in own(function):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and is_elapsed(node.value, set())
        ):
            names.add(node.targets[0].id)
    for node in own(function):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare):
                sides = [part.left, *part.comparators]
                for left, operator, right in zip(sides, part.ops, sides[1:], strict=False):
                    small = left if isinstance(operator, ast.Lt | ast.LtE) else right
                    if not isinstance(operator, ast.Eq | ast.NotEq) and is_elapsed(small, names):
                        yield part


def lives(function: ast.AST) -> Iterator[ast.AST]:
    """Yield assertions that a thread or process has ended, without a wait just before."""
    for block in (
        node for node in [function, *own(function)] if isinstance(getattr(node, "body", None), list)
    ):
        before: ast.AST | None = None
        for statement in block.body:
            asks = isinstance(statement, ast.Assert) and any(
                called(part, "is_alive") for part in ast.walk(statement)
            )
            if asks and not (
                before is not None and any(called(part, "join") for part in ast.walk(before))
            ):
                yield statement
            before = statement


def seconds_of(call: ast.Call) -> float | None:
    """Return the longest time that a call waits, where it is written there as a number."""
    assert isinstance(call.func, ast.Attribute)
    given = [
        keyword.value for keyword in call.keywords if keyword.arg in ("timeout", "start_timeout_s")
    ]
    if call.func.attr in ("join", "result", "wait") and len(call.args) == 1:
        given.append(call.args[0])
    numbers = [
        float(v.value)
        for v in given
        if isinstance(v, ast.Constant) and isinstance(v.value, int | float)
    ]
    return numbers[0] if numbers else None


def waits(function: ast.AST) -> Iterator[ast.AST]:
    """Yield short waits for an event that must come, outside of ``pytest.raises``."""
    refused: set[int] = set()
    for node in own(function):
        if isinstance(node, ast.With) and any(
            "raises" in ast.unparse(item.context_expr) for item in node.items
        ):
            refused.update(map(id, ast.walk(node)))
    for node in own(function):
        if (
            called(node, "communicate", "wait", "get", "join", "result", "run", "wait_for")
            and id(node) not in refused
        ):
            assert isinstance(node, ast.Call)
            seconds = seconds_of(node)
            if seconds is not None and 0 < seconds < SHORT_S:
                yield node


def ports(function: ast.AST) -> Iterator[ast.AST]:
    """Yield searches for a free port that is bound later: another process may take it meanwhile."""
    for node in own(function):
        if (
            called(node, "bind")
            and isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Tuple)
        ):
            yield node


SHAPES = {"sleep": sleeps, "bound": bounds, "is_alive": lives, "wait": waits, "port": ports}


def sources() -> list[Path]:
    found = [
        path
        for folder in ("tests", "conformance", "packages", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return [
        path
        for path in found
        if "tests" in path.relative_to(ROOT).parts and path.name != "waiting.py"
    ]


def found_in(text: str) -> set[tuple[str, str, int]]:
    """Return each shape in a source as (function, shape, line)."""
    return {
        (name, shape, getattr(node, "lineno", 0))
        for name, function in functions(ast.parse(text))
        for shape, find in SHAPES.items()
        for node in find(function)
    }


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("def test():\n    start()\n    time.sleep(1)\n    assert done()", "sleep"),
        ("async def test():\n    await asyncio.sleep(0.1)", "sleep"),
        (
            "def test():\n    begin = time.monotonic()\n    assert time.monotonic() - begin < 5",
            "bound",
        ),
        ("def test():\n    assert 5 > time.perf_counter() - begin", "bound"),
        ("def test():\n    took = time.monotonic() - begin\n    assert 1 < took < 5", "bound"),
        ("def test():\n    process.kill()\n    assert not process.is_alive()", "is_alive"),
        (
            (
                "def test():\n    process.send_signal(9)\n"
                "    assert [p.is_alive() for p in processes] == [False]"
            ),
            "is_alive",
        ),
        ("def test():\n    process.wait(timeout=5)", "wait"),
        ("def test():\n    assert running.result(2) == 3", "wait"),
        ("def test():\n    subprocess.run(command, timeout=10)", "wait"),
        (
            "def test():\n    with socket.socket() as free:\n        free.bind(('127.0.0.1', 0))",
            "port",
        ),
    ],
)
def test_each_shape_is_found(text: str, shape: str) -> None:
    assert {found for _, found, _ in found_in(text)} == {shape}


@pytest.mark.parametrize(
    "text",
    [
        "def test():\n    while not done():\n        time.sleep(0.1)",
        (
            "def test():\n    end = time.monotonic() + 60\n"
            "    while time.monotonic() < end:\n        pass"
        ),
        "def test():\n    assert time.monotonic() - begin >= 0.3",
        "def test():\n    thread.join()\n    assert not thread.is_alive()",
        "def test():\n    with pytest.raises(TimeoutError):\n        running.result(0.1)",
        "def test():\n    until(lambda: not process.is_alive())\n    process.wait(DEADLINE_S)",
        "async def test():\n    await asyncio.sleep(0)",
        "def test():\n    rollout.sleep()",
        "def hangs():\n    time.sleep(NEVER_S)",
    ],
)
def test_what_waits_for_a_condition_is_none_of_them(text: str) -> None:
    assert found_in(text) == set()


@pytest.mark.slow
def test_no_test_depends_on_an_idle_machine() -> None:
    found: list[str] = []
    used: set[tuple[str, str]] = set()
    for path in sources():
        for name, shape, line in sorted(found_in(path.read_text())):
            place = f"{path.relative_to(ROOT)}::{name}"
            if shape in EXCEPTIONS.get(place, {}):
                used.add((place, shape))
            else:
                found.append(
                    f"{place}:{line}: {shape}: {(SHAPES[shape].__doc__ or '').splitlines()[0]}"
                )
    assert not found, "\n".join(found)
    assert {(place, shape) for place, shapes in EXCEPTIONS.items() for shape in shapes} == used, (
        "an exception of nothing"
    )
