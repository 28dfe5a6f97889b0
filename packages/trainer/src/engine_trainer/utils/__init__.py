"""Helpers of several packages for users' functions, threads and Hugging Face models."""
