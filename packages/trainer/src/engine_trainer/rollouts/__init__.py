"""Rollouts that the trainer brings along: ``local``, Hugging Face generation in the trainer's own process."""
