"""The form in which weights travel, their checksums, and the audit of a sync."""
