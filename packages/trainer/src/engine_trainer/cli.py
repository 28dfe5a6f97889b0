"""The command line ``engine-train COMMAND …``, with a table of its commands.

``engine-train TASK CONFIG [key.sub=value …]`` runs a task.

Exit status: 0 for a run that is done (or was stopped by Ctrl-C and saved), 1 for a run that
failed, 2 for wrong usage or input, 130 for a run that a second Ctrl-C aborted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_api.config import near_matches
from engine_api.devices import torch_version
from engine_api.errors import ConfigError, EngineError, PluginNotFound, RankFailure
from engine_api.heartbeat import raised_by_all
from engine_api.plugin import CONTRACT
from engine_trainer.config import (
    Config,
    DPOConfig,
    KTOConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from engine_trainer.config.explain import explain, installed_names
from engine_trainer.config.loading import load_config, schema_text, to_plain
from engine_trainer.config.recipes import ALL, DEFAULT_FOLDER, copy_recipe, list_recipes
from engine_trainer.config.tasks import find_task
from engine_trainer.errors import DataError
from engine_trainer.replay import command as replay
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.run.run import Outcome, global_rank, world_size
from engine_trainer.run.torchrun import end_with_torchrun, is_news
from engine_trainer.telemetry.logs import METRICS, last_step
from engine_trainer.utils.cores import set_threads
from engine_trainer.utils.terminal import escape

DONE, FAILED, USAGE = 0, 1, 2
ABORTED = 130  # the status that a shell reports for SIGINT
CONFIGS: dict[str, type[Config]] = {
    "sft": SFTConfig,
    "rl": RLConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "rm": RewardModelConfig,
    "eval": RLConfig,
}
TASKS = ("sft", "rl", "dpo", "kto", "rm")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ``engine-train``."""

    summary: str
    """Text of the help: a sentence in the imperative, without capital letter and full stop."""

    run: Callable[[argparse.Namespace], int]
    """Function that carries the command out and returns the exit status."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Function that adds the command's arguments to its parser."""

    takes_overrides: bool = False
    """True for a command whose arguments end in ``key.sub=value …``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Errors of the contract are printed without a traceback, which ``--debug`` shows.
    """
    # This comes before anything slow: until here a rank would outlive its launcher.
    end_with_torchrun()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
    try:
        if getattr(options, "ranks", None) is not None and "RANK" not in os.environ:
            return _run_ranks(arguments, options.ranks)
        return COMMANDS[options.command].run(options)
    except EngineError as error:
        _report(error, debug=getattr(options, "debug", False))
        return USAGE if isinstance(error, ConfigError | DataError | PluginNotFound) else FAILED


def _run_ranks(arguments: Sequence[str], ranks: int) -> int:
    if ranks < 1:
        raise ConfigError("--ranks", f"expected 1 or more, got {ranks}")
    # The import stands here because it loads torch.
    from engine_trainer.run.local_ranks import run_ranks

    return run_ranks(arguments, ranks)


def _run_task(options: argparse.Namespace) -> int:
    _set_up_logging()
    config: Config | None = None
    try:
        config = load_config(_config_class(options), options.config, options.overrides)
        return _run_config(options, config)
    except KeyboardInterrupt:
        if global_rank() == 0:
            _say(_describe_abort(options.command, config))
        return ABORTED


def _config_class(options: argparse.Namespace) -> type[Config]:
    if options.command != "eval":
        return CONFIGS[options.command]
    return CONFIGS[find_task(options.config, options.overrides, ("rl", "sft"), options.task)]


def _show_data(options: argparse.Namespace) -> int:
    # The import stands here because it loads the readers of data.
    from engine_trainer.preview.command import show_data

    _set_up_logging()
    task = find_task(options.config, options.overrides, TASKS, options.task)
    config = load_config(CONFIGS[task], options.config, options.overrides)
    fits = show_data(config, task, rows=options.rows, row=options.row, color=options.color)
    return DONE if fits else USAGE


def _rehearse(options: argparse.Namespace) -> int:
    # The import stands here because it loads the readers of data.
    from engine_trainer.rehearsal import rehearse

    task = find_task(options.config, options.overrides, TASKS, options.task)
    config = load_config(CONFIGS[task], options.config, options.overrides)
    nothing_found = rehearse(
        config,
        task,
        Path(options.config),
        options.overrides,
        ranks=options.gloo_ranks,
        gpus=options.gpus,
        folder=options.folder,
        model=options.model,
    )
    return DONE if nothing_found else USAGE


def _explain(options: argparse.Namespace) -> int:
    # The import stands here because it loads torch.
    from engine_trainer.explanation import explain_step

    nothing_found = explain_step(
        options.folder,
        options.step,
        options.overrides,
        documents=options.documents,
        live=options.live,
    )
    return DONE if nothing_found else FAILED


def _print_schema(options: argparse.Namespace) -> int:
    if options.task not in CONFIGS:
        remedy = near_matches(options.task, sorted(CONFIGS))
        _say(f"error: expected a task after `schema`, got {options.task!r:.100}; {remedy}")
        return USAGE
    print(schema_text(options.task), end="")
    return DONE


def _view(options: argparse.Namespace) -> int:
    from engine_trainer.telemetry.view import write_view

    print(write_view(options.folder, options.output))
    return DONE


def _recipes(options: argparse.Namespace) -> int:
    if options.action == "copy":
        copied = copy_recipe(options.name, options.folder)
        print(f"copied to {options.folder}; to run, with values for the keys that are ???:")
        print("\n".join(f"  {command}" for command in copied.values()))
        return DONE
    found = list_recipes()
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {about}" for name, about in found.items()))
    print(f"\nengine-train recipes copy NAME [FOLDER] copies one to {DEFAULT_FOLDER}/ or FOLDER")
    return DONE


def _export(options: argparse.Namespace) -> int:
    _set_up_logging()
    # The import stands here because it loads torch.
    from engine_trainer.export import export_checkpoint

    found = export_checkpoint(
        options.checkpoint,
        options.directory,
        CONFIGS,
        dtype=options.dtype,
        adapter=options.adapter,
        overrides=options.overrides,
    )
    if global_rank() == 0:
        what = "the adapter" if options.adapter else "the model"
        print(f"{what} of {found} is in {options.directory}")
    return DONE


def _replay(options: argparse.Namespace) -> int:
    _set_up_logging()
    return DONE if replay.run_replay(options) else FAILED


def _run_config(options: argparse.Namespace, config: Config) -> int:
    if options.print_config:
        if global_rank() == 0:
            task = "sft" if isinstance(config, SFTConfig) else options.command
            schema = json.loads(schema_text(task))
            print(explain(to_plain(config), schema, installed_names()), end="")
        return DONE
    # Ray gives each worker the cores that were asked for it.
    on_ray = isinstance(config, RLConfig) and config.launcher == "ray"
    if not on_ray and (line := set_threads()) and global_rank() == 0:
        logging.getLogger("engine_trainer").info(line)
    if options.command == "eval":
        assert isinstance(config, RLConfig | SFTConfig)
        _evaluate(config)
        return DONE
    outcome = _train(config)
    if global_rank() == 0:
        _print_summary(outcome)
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
        case KTOConfig():
            from engine_trainer.preferences.kto import train_kto

            return train_kto(config)
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


def _evaluate(config: RLConfig | SFTConfig) -> None:
    if isinstance(config, SFTConfig):
        from engine_trainer.sft import evaluate_sft

        figures = evaluate_sft(config)
    else:
        from engine_trainer.sampling.evaluate import evaluate_model

        figures = evaluate_model(config)
    if global_rank() == 0:
        print("\n".join(f"  {name:<32}{value:>12.4g}" for name, value in figures.items()))


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "launcher",
            "ray is not installed",
            remedy="pip install 'engine-trainer[ray]', or launcher: none",
        )


def _describe_abort(task: str, config: Config | None) -> str:
    """Return the message that says which checkpoint an interrupted command leaves."""
    if config is None or task == "eval":
        return "aborted"
    folder = Path(config.run.output_dir)
    newest = max(Checkpoints(folder / "checkpoints", keep=config.run.keep).steps(), default=0)
    lost = last_step(folder / METRICS) - newest
    loss = f" ({lost} step{'s' if lost > 1 else ''} will be trained again)" if lost > 0 else ""
    if not newest:
        return f"aborted; there is no checkpoint: the same command starts at step 1{loss}"
    again = "the same command" if config.run.resume == "auto" else "run.resume=auto"
    return f"aborted; the newest checkpoint is of step {newest}: {again} continues from it{loss}"


def _print_summary(outcome: Outcome) -> None:
    from engine_trainer.telemetry.series import summary

    print(summary(outcome.folder))
    if outcome.report is not None:
        print(f"  report: {outcome.report}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _build_parser()
    options, rest = parser.parse_known_args(_command_first(argv))
    # argparse leaves over the overrides that stand behind an option.
    if COMMANDS[options.command].takes_overrides:
        options.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _command_first(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the command before the options, which may precede it."""
    at = next((i for i, word in enumerate(argv) if word in COMMANDS), 0)
    if not all(word.startswith("-") for word in argv[:at]):
        return list(argv)
    return [*argv[at : at + 1], *argv[:at], *argv[at + 1 :]]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-train",
        description="SFT, RL, DPO, KTO, reward models and evaluation over any engine, by name.",
        epilog="`engine-train COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in COMMANDS.items():
        about = f"{command.summary[0].upper()}{command.summary[1:]}."
        command.add_arguments(commands.add_parser(name, help=command.summary, description=about))
    return parser


def _version() -> str:
    return (
        f"engine-train {importlib.metadata.version('engine-trainer')} (contract {CONTRACT}, "
        f"torch {torch_version() or 'not installed'}, Python {platform.python_version()})"
    )


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file; `engine-train recipes` lists some")
    _add_overrides(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file_arguments(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the whole configuration, with the meaning and the allowed values of each key, "
        "and stop",
    )
    _add_ranks(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="run as N processes of this machine, one for each GPU; torchrun does it for several",
    )


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    _add_task_arguments(parser)
    parser.add_argument(
        "--task", help="rl or sft, where the file's keys do not tell of which task it is"
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file_arguments(parser)
    parser.add_argument(
        "--task",
        help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}, where the file's keys do not tell which",
    )
    parser.add_argument(
        "--rows", type=int, default=3, metavar="N", help="show the first N rows, by default 3"
    )
    parser.add_argument(
        "--row", type=int, metavar="I", help="show row I in full, counted from 1 over all files"
    )
    parser.add_argument(
        "--color",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="color the text, by default on a terminal (NO_COLOR turns it off)",
    )


def _add_rehearse_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file_arguments(parser)
    parser.add_argument(
        "--task",
        help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}, where the file's keys do not tell which",
    )
    # `--ranks` of the other commands starts this command as ranks; here its parts are started so.
    parser.add_argument(
        "--ranks",
        type=int,
        dest="gloo_ranks",
        metavar="N",
        help="train on N gloo ranks, by default 2, or 1 on a machine with one core",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="calculate memory and time of the real run for N GPUs, by default those that the "
        "configuration asks for, or one node",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="take the small model of this folder, by default one that is made from the "
        "config.json of engine.model",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the rehearsal's files in this new folder, by default only where it fails, in a "
        "temporary one",
    )


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="output_dir of an RL run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step, from 1")
    _add_overrides(parser)
    parser.add_argument(
        "--documents",
        type=int,
        default=8,
        metavar="N",
        help="compare N completions of the step, by default 8",
    )
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute with the engine, too, which shows its layers",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint, a run's folder (its newest one), or RUN/checkpoints/best",
    )
    parser.add_argument("directory", type=Path, help="a new folder")
    _add_overrides(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights; by default run.hf_dtype, or the dtype of the computation",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write the LoRA adapter alone, as PEFT reads it"
    )
    _add_ranks(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    replay.add_arguments(parser)
    _add_overrides(parser)
    _add_ranks(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="take the place of values in the file",
    )


def _add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help=f"one of {', '.join(CONFIGS)}")


def _add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="output_dir of a run, which may be running")
    parser.add_argument("--output", type=Path, help="file to write, by default FOLDER/view.html")


def _add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(dest="action", metavar="copy")
    copy = actions.add_parser(
        "copy",
        help="copy a recipe, with the files that it names, to a folder",
        description="Copy a recipe, with the files that it names, to a folder.",
    )
    copy.add_argument(
        "name",
        nargs="?",
        default=ALL,
        help=f"recipe, folder of recipes, or `{ALL}`, which is the default",
    )
    copy.add_argument(
        "folder",
        nargs="?",
        default=DEFAULT_FOLDER,
        type=Path,
        help=f"folder to copy to, by default {DEFAULT_FOLDER}",
    )


def _task_command(summary: str) -> Command:
    return Command(
        summary=summary, run=_run_task, add_arguments=_add_task_arguments, takes_overrides=True
    )


COMMANDS = {
    "sft": _task_command("fine-tune a model on documents (supervised fine-tuning)"),
    "rl": _task_command("train a model on rewards for its own completions (GRPO, PPO, DAPO, …)"),
    "dpo": _task_command(
        "train a model on pairs of a better and a worse response (DPO, IPO, hinge)"
    ),
    "kto": _task_command("train a model on responses that are labelled desirable or not (KTO)"),
    "rm": _task_command("train a reward model on pairs of responses"),
    "eval": Command(
        summary="measure a model on held-out problems or documents, with a file of `rl` or `sft`",
        run=_run_task,
        add_arguments=_add_eval_arguments,
        takes_overrides=True,
    ),
    "data": Command(
        summary="show the rows as they are trained on, their lengths, and what is left out",
        run=_show_data,
        add_arguments=_add_data_arguments,
        takes_overrides=True,
    ),
    "rehearse": Command(
        summary="run a configuration small on this machine, with a kill and a change of the engine",
        run=_rehearse,
        add_arguments=_add_rehearse_arguments,
        takes_overrides=True,
    ),
    "explain": Command(
        summary="compare a recorded step of RL with a float64 oracle, and name the likeliest cause "
        "of a difference",
        run=_explain,
        add_arguments=_add_explain_arguments,
        takes_overrides=True,
    ),
    "export": Command(
        summary="write the model of a checkpoint as a Hugging Face folder",
        run=_export,
        add_arguments=_add_export_arguments,
        takes_overrides=True,
    ),
    "replay": Command(
        summary="make a recorded step of `rl` again, and show what differs",
        run=_replay,
        add_arguments=_add_replay_arguments,
        takes_overrides=True,
    ),
    "view": Command(
        summary="write a page with the completions and evaluations of a run, for a browser",
        run=_view,
        add_arguments=_add_view_arguments,
    ),
    "recipes": Command(
        summary="list the configurations that come with the package, or copy some",
        run=_recipes,
        add_arguments=_add_recipes_arguments,
    ),
    "schema": Command(
        summary="print the JSON schema of a task's files, for an editor",
        run=_print_schema,
        add_arguments=_add_schema_arguments,
    ),
}


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
    text = f"{kind}: {error}"
    # Many ranks fail alike: a wrong key is wrong on every rank.
    reported = isinstance(error, RankFailure) and raised_by_all(error)
    if debug or world_size() == 1 or is_news(text, reported_elsewhere=reported):
        _say(text)


def _say(text: str) -> None:
    # Each message is one write, so that lines of several ranks do not run into each other.
    # Errors quote data, whose control characters must not reach a terminal.
    prefix = _prefix()
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in escape(text).split("\n")))
    sys.stderr.flush()


def _prefix() -> str:
    return f"[rank {global_rank()}] " if world_size() > 1 else ""
