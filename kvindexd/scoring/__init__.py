"""From a prompt and a replica view to what each worker would reuse, and which should get it."""
