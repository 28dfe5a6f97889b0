"""Engines on NeMo Automodel's models for engine-api.

This file is empty so that loading the plug-in's descriptor stays light.
"""
