"""The state of the process that every test of the tree begins with."""

import importlib
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt this process and those that it starts, and import all of hypothesis."""
    # A job that a shell starts in the background ignores Ctrl-C, and so do the processes that its
    # tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Its plugin imports this behind the last test, and pytest parses each module for its
    # assertions. Before 3.11.8 Python may fail there while a thread that a test left parses, too
    # (python/cpython#106905).
    if config.pluginmanager.hasplugin("hypothesispytest"):
        importlib.import_module("hypothesis.internal.observability")
