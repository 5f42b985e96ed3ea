"""The safety core: pure Python, events in, actions out; no I/O, no clock, no threads, no torch."""
