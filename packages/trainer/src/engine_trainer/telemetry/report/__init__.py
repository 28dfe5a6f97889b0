"""The report of a run: one HTML page to show to a colleague."""

from engine_trainer.telemetry.report.page import write_report

__all__ = ["write_report"]
