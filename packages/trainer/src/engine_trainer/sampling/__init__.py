"""Completions with scores: sampling for training and for evaluation."""
