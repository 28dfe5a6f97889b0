"""Training on pairs of documents, for DPO and reward models."""
