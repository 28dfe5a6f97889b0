"""Megatron-core engine for engine-api. Kept empty so that loading the plug-in descriptor stays light."""
