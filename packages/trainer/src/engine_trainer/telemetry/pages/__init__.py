"""Parts that the pages of a run share: the document, charts, and the problems of evaluations."""
