"""The command line ``engine-train sft|rl|dpo|rm|eval CONFIG [key.sub=value …]``.

``engine-train schema TASK`` prints the JSON schema of a task's files.

Exit status: 0 for a run that is done (or was stopped by Ctrl-C and saved), 1 for a run that
failed, 2 for wrong usage or input, 130 for a run that a second Ctrl-C aborted.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from engine_api.config import near_matches
from engine_api.errors import ConfigError, EngineError, RankFailure
from engine_trainer.config import Config, DPOConfig, RewardModelConfig, RLConfig, SFTConfig
from engine_trainer.config.loading import load_config, schema_text, to_yaml
from engine_trainer.errors import DataError
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.run.run import Outcome, global_rank, world_size
from engine_trainer.run.torchrun import end_with_torchrun

DONE, FAILED, USAGE = 0, 1, 2
ABORTED = 130  # the status that a shell reports for SIGINT
CONFIGS: dict[str, type[Config]] = {
    "sft": SFTConfig,
    "rl": RLConfig,
    "dpo": DPOConfig,
    "rm": RewardModelConfig,
    "eval": RLConfig,
}
SCHEMA = "schema"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Errors of the contract are printed without a traceback, which ``--debug`` shows.
    """
    # This comes before anything slow: until here a rank would outlive its launcher.
    end_with_torchrun()
    options = _parser().parse_intermixed_args(argv)
    if options.task == SCHEMA:
        return _print_schema(options.config)
    _set_up_logging()
    config: Config | None = None
    try:
        config = load_config(CONFIGS[options.task], options.config, options.overrides)
        return _run(options, config)
    except EngineError as error:
        _report(error, debug=options.debug)
        return USAGE if isinstance(error, ConfigError | DataError) else FAILED
    except KeyboardInterrupt:
        if global_rank() == 0:
            _say(_aborted(options.task, config))
        return ABORTED


def _print_schema(task: str) -> int:
    if task not in CONFIGS:
        remedy = near_matches(task, sorted(CONFIGS))
        _say(f"error: expected a task after `schema`, got {task!r:.100}; {remedy}")
        return USAGE
    print(schema_text(task), end="")
    return DONE


def _run(options: argparse.Namespace, config: Config) -> int:
    if options.print_config:
        if global_rank() == 0:
            print(to_yaml(config), end="")
        return DONE
    if options.task == "eval":
        assert isinstance(config, RLConfig)
        _evaluate(config)
        return DONE
    outcome = _train(config)
    if global_rank() == 0:
        _close(outcome, report=config.run.report)
    return DONE


def _train(config: Config) -> Outcome:
    # The imports stand here so that --print-config and a wrong key answer without loading torch.
    match config:
        case SFTConfig():
            from engine_trainer.sft import train_sft

            return train_sft(config)
        case DPOConfig():
            from engine_trainer.preferences.dpo import train_dpo

            return train_dpo(config)
        case RewardModelConfig():
            from engine_trainer.preferences.reward_model import train_reward_model

            return train_reward_model(config)
        case RLConfig(launcher="ray"):
            _require_ray()
            from engine_trainer.rl.on_ray import train_on_ray

            return train_on_ray(config)
        case RLConfig():
            from engine_trainer.rl.loop import train_rl

            return train_rl(config)


def _evaluate(config: RLConfig) -> None:
    from engine_trainer.sampling.evaluate import evaluate_model

    figures = evaluate_model(config)
    if global_rank() == 0:
        print("\n".join(f"  {name:<32}{value:>12.4g}" for name, value in figures.items()))


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "launcher",
            "ray is not installed",
            remedy="pip install engine-trainer[ray], or launcher: none",
        )


def _aborted(task: str, config: Config | None) -> str:
    """Return the message that says which checkpoint an interrupted command leaves."""
    if config is None or task == "eval":
        return "aborted"
    steps = Checkpoints(Path(config.run.output_dir) / "checkpoints", keep=config.run.keep).steps()
    if not steps:
        return "aborted; there is no checkpoint yet, the same command begins anew"
    again = "the same command" if config.run.resume == "auto" else "run.resume=auto"
    return f"aborted; the checkpoint of step {max(steps)} stands, {again} goes on from there"


def _close(outcome: Outcome, *, report: bool) -> None:
    from engine_trainer.telemetry.report import summary

    print(summary(outcome.folder))
    if report:
        print(f"  report: {outcome.folder / 'report.html'}   plots: {outcome.folder / 'plots'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-train",
        description="SFT, RL, DPO, reward models and evaluation over any engine, by name.",
    )
    parser.add_argument(
        "task",
        choices=[*sorted(CONFIGS), SCHEMA],
        help=f"task to run, or `{SCHEMA}` for the JSON schema of a task's files",
    )
    parser.add_argument(
        "config", help=f"YAML file, of which recipes/ holds some; after `{SCHEMA}` a task"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="take the place of values in the file",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole configuration and stop"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _set_up_logging() -> None:
    # Every rank logs its own warnings; messages that are equal on all ranks come from rank 0.
    level = logging.INFO if global_rank() == 0 else logging.WARNING
    logging.basicConfig(stream=sys.stderr, format=f"{_prefix()}%(message)s", level=logging.WARNING)
    for name in ("engine_api", "engine_trainer"):
        logging.getLogger(name).setLevel(level)


def _report(error: EngineError, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    kind = "stopped" if isinstance(error, RankFailure) else "error"
    _say(f"{kind}: {error}")


def _say(text: str) -> None:
    # Each message is one write, so that lines of several ranks do not run into each other.
    prefix = _prefix()
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def _prefix() -> str:
    return f"[rank {global_rank()}] " if world_size() > 1 else ""
