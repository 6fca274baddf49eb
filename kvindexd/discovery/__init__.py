"""Finds workers: sources say which there are, one reconciler registers and deregisters them."""
