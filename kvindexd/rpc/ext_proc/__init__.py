"""Envoy's external processor: the endpoint picker of an inference gateway."""
