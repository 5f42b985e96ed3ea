"""The native CPU step: a small C++ library over packed weights and paged KV, one build for each instruction set."""
