"""Drafters: one file each, found by name. A drafter proposes trees; it can never change what is generated."""
