"""Training on preferences: pairs for DPO and reward models, labelled rows for KTO."""
