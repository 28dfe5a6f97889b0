"""Engines on VeOmni's model classes for engine-api.

This file is empty so that loading the plug-in's descriptor stays light.
"""
