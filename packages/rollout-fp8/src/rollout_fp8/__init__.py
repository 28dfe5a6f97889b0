"""Rollouts on vLLM and SGLang, in bf16 and blockwise FP8, and the weight sync that feeds them."""
