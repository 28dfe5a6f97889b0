"""A local page of what the model says: a run's completions and evaluations in one HTML file."""

from engine_trainer.telemetry.view.page import write_view

__all__ = ["write_view"]
