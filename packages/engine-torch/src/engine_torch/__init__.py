"""Parts that engines over DTensor share, for engine-api.

This file is empty so that an engine loads only the modules that it uses.
"""
