"""Blockwise FP8: the quantizer and the table of layers that are quantized."""
