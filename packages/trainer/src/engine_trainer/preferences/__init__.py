"""Training on pairs of documents: DPO and reward models."""
