"""The state of the process that every test of the tree begins with."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C interrupt this process and those that it starts."""
    # A job that a shell starts in the background ignores Ctrl-C, and so do the processes that its
    # tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
