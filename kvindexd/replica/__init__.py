"""The in-memory replica of the index that queries read."""
