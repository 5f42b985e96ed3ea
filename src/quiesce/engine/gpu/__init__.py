"""What a device with memory of its own needs: paged attention, graphs of the decode step, a mirror of the pool."""
