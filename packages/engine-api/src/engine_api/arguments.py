"""Checks of the arguments of an engine's members, made before anything is computed or changed."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine_api.batch import Batch
from engine_api.errors import BatchError, ConfigError, kind_of
from engine_api.results import LossOutput

if TYPE_CHECKING:
    import torch

# Logits are float32. Divided by a smaller number they leave its range, and log-probs become NaN.
LEAST_TEMPERATURE = 1e-30


def check_batch(batch: object) -> None:
    """Raise ``BatchError`` unless the argument is a ``Batch``."""
    if not isinstance(batch, Batch):
        raise BatchError(
            "input_ids",
            f"expected a Batch, got {kind_of(batch)}",
            remedy="build it with Batch or Batch.pack",
        )


def check_loss(loss: object) -> None:
    """Raise ``ConfigError`` unless the loss can be called."""
    if not callable(loss):
        raise ConfigError(
            "loss",
            f"expected a function of outputs and batch, got {kind_of(loss)}",
            remedy="give one such as sft_loss",
        )


def denominator_of(value: object) -> float | None:
    """Return a call's denominator as a float, or None for the sum of ``loss_weight``.

    Raises ``ConfigError`` if it is not a positive number.
    """
    if value is None:
        return None
    return _positive("denominator", value, "leave it out for Σ loss_weight")


def temperature_of(value: object) -> float:
    """Return a call's temperature as a float.

    Raises ``ConfigError`` if it is not a number of at least ``LEAST_TEMPERATURE``.
    """
    temperature = _positive("temperature", value, "use 1.0")
    if temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            "temperature", f"expected at least {LEAST_TEMPERATURE}, got {value}", remedy="use 1.0"
        )
    return temperature


def check_switches(**switches: object) -> None:
    """Raise ``ConfigError`` for a switch that is neither True nor False.

    A string such as ``"no"`` would count as True.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(
                name, f"expected True or False, got {value!r:.100}", remedy="give a bool"
            )


def check_device(device: object, own: str) -> None:
    """Raise ``ConfigError`` unless ``device`` is the CPU or the engine's ``own`` kind of device."""
    if not isinstance(device, str) or device not in ("cpu", own):
        raise ConfigError(
            "device",
            f"{device!r:.100} is neither cpu nor this engine's {own}",
            remedy=f"cpu or {own}",
        )


def check_export(dtype: object, bucket_bytes: object = 1) -> None:
    """Raise ``ConfigError`` for a dtype that cannot hold weights, or a size below 1."""
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "dtype",
            f"expected a floating torch.dtype or None, got {dtype!r:.100}",
            remedy="use torch.bfloat16",
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigError(
            "bucket_bytes",
            f"expected a positive integer, got {bucket_bytes!r:.100}",
            remedy="leave it out for 512 MiB",
        )


def folder_of(directory: object) -> Path:
    """Return ``directory`` as a path.

    Raises ``ConfigError`` if it cannot be one.
    """
    is_path = isinstance(directory, str | os.PathLike)
    path = str(cast("os.PathLike[str]", directory)) if is_path else ""
    if not path:
        raise ConfigError(
            "directory", f"expected a path, got {directory!r:.100}", remedy="name a folder"
        )
    try:
        os.lstat(path)
    # Each member decides for itself whether the folder must exist.
    except (FileNotFoundError, NotADirectoryError):
        pass
    # The path is too long, contains a NUL, is a loop of links, or there is no permission.
    except (OSError, ValueError) as error:
        raise ConfigError(
            "directory",
            f"{path!r:.100} cannot be looked at",
            why=str(error)[:200],
            remedy="name a folder",
        ) from error
    return Path(path)


def check_extra(extra: object) -> None:
    """Raise ``ConfigError`` unless ``extra`` is a mapping or None.

    ``checkpoint`` checks that it can be written as JSON.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(
            "extra",
            f"expected a mapping, got {kind_of(extra)}",
            remedy="give {name: value, …}, or None",
        )


def check_loss_output(output: object) -> None:
    """Raise ``ConfigError`` for an output of a loss that cannot be differentiated or added up."""
    if not isinstance(output, LossOutput):
        raise ConfigError(
            "loss",
            f"expected a LossOutput, got {kind_of(output)}",
            remedy="return LossOutput(loss=…)",
        )
    _check_loss_value(output.loss)
    metrics = cast("object", output.metrics)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "loss.metrics",
            f"expected a mapping, got {kind_of(metrics)}",
            remedy="give {name: number, …}",
        )
    for name, value in cast("Mapping[object, object]", metrics).items():
        _check_metric(name, value)


def _check_loss_value(value: object) -> None:
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        shape = f" of {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigError(
            "loss",
            f"expected a floating tensor of one element, got {kind_of(value)}{shape}",
            remedy="sum over the tokens",
        )
    if not value.requires_grad:
        raise ConfigError(
            "loss",
            "has no gradient",
            why="it does not depend on the outputs",
            remedy="compute it from them",
        )


def _check_metric(name: object, value: object) -> None:
    import torch

    fits = isinstance(value, numbers.Real)
    if isinstance(value, torch.Tensor):
        fits = value.numel() == 1 and not value.is_complex() and not value.is_meta
    if not isinstance(name, str) or name == "loss" or not fits:
        raise ConfigError(
            f"loss.metrics.{name!s:.100}",
            f"expected one number under a name other than loss, got {kind_of(value)}",
            remedy="give sums over the tokens, as numbers or tensors of one element",
        )


def check_coefficients(value: object, like: torch.Tensor) -> None:
    """Raise ``ConfigError`` unless ``value`` is None or has the shape of ``like`` ``[T]``."""
    import torch

    fits = (
        isinstance(value, torch.Tensor) and value.shape == like.shape and value.is_floating_point()
    )
    if value is not None and not fits:
        raise ConfigError(
            "loss.coefficients",
            f"expected a floating tensor of shape {tuple(like.shape)} or None, "
            f"got {kind_of(value)}",
            remedy="give the derivative of the loss by each log-prob",
        )


def _positive(name: str, value: object, remedy: str) -> float:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not 0 < number < math.inf:
        raise ConfigError(name, f"expected a positive number, got {value!r:.100}", remedy=remedy)
    return number
