"""Megatron-core engine for engine-api.

It is empty, so that loading the plug-in descriptor stays light.
"""
