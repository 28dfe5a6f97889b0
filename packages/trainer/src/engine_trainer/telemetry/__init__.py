"""Logs, reports, profiles and throughput of a run."""
