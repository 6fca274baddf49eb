"""Envoy's external processing messages, generated from proto/kvindexd/extproc."""
