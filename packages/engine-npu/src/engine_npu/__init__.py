"""Engines on Ascend NPUs for engine-api. Kept empty so that loading the plug-in descriptors stays light."""
