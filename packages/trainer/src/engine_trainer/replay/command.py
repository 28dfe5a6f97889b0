"""The arguments and the output of ``engine-train replay``."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from engine_trainer.run.run import global_rank
from engine_trainer.utils.cores import set_threads
from engine_trainer.utils.terminal import escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments to its parser."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="output_dir of a run of `rl`")
    parser.add_argument(
        "--step", type=int, required=True, metavar="N", help="step to make again, from 1"
    )


def run_replay(options: argparse.Namespace) -> bool:
    """Make the step again, print what differs, and return whether the result is as expected.

    It is unless something differs although engine, machine and versions are the recorded ones.
    """
    if (line := set_threads()) and global_rank() == 0:
        logging.getLogger("engine_trainer").info(line)
    # The imports stand here because they load torch.
    from engine_trainer.replay.again import replay_step
    from engine_trainer.replay.table import format_replay

    replayed = replay_step(options.folder, options.step, options.overrides)
    if global_rank() == 0:
        print(escape(format_replay(replayed)))
    return replayed.same_bits or bool(replayed.surroundings)
