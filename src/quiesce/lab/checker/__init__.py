"""The explicit-state checker: real core machines, a modelled network and memory, every interleaving."""
