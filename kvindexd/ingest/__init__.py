"""Ingest: from an engine's sockets to an ordered, gap-checked stream of batches."""
