"""``engine-train data``: the rows of a configuration as they are trained on, without training."""

from __future__ import annotations

from engine_trainer.preview.collect import Preview as Preview
from engine_trainer.preview.collect import collect as collect
from engine_trainer.preview.show import show as show
