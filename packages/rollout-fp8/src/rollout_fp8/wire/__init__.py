"""Wire format of weights, their checksums, and the audit of a sync."""
