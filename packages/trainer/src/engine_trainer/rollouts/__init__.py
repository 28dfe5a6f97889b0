"""The trainer's own rollout ``local``, Hugging Face generation in the trainer's process."""
