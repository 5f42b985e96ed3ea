"""A whole cluster on a virtual clock: the real router, roles and core between modelled sockets, engines and NICs."""
