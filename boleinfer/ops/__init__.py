"""The operations of the model families: one file a family, each with its NumPy definition and its CASES."""
