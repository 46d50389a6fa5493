"""Model families, one file each, found by `model_type`; the folders beside them hold bundled weights."""
