"""Completions with scores, for training and for evaluation."""
