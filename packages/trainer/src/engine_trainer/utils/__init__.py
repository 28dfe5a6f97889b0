"""Helpers without a home of their own: users' functions, threads, Hugging Face models."""
