"""`quiesce plan`: what holding pages until proof costs a cluster of a given size, counted request by request."""
