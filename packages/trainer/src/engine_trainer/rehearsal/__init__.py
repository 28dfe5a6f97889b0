"""A rehearsal: the user's own configuration, run small on this machine before a cluster runs it."""

from __future__ import annotations

from engine_trainer.rehearsal.command import rehearse as rehearse
