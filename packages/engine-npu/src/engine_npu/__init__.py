"""Engines on Ascend NPUs for engine-api.

This file is empty so that loading the plug-in descriptors stays light.
"""
