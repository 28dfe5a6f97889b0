"""Training on judged documents: pairs for DPO and reward models, labelled ones for KTO."""
