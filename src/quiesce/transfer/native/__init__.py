"""The mover's native copy: a few lines of C++, one build, loaded by `quiesce.transfer.copying`."""
