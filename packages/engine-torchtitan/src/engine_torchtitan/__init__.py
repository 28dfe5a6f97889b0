"""Engines on torchtitan's models and parallelism for engine-api.

This file is empty so that loading the plug-in's descriptor stays light.
"""
