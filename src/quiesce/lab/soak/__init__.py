"""The soak: many tenants, cut requests and broken processes against a running cluster, for as long as it is given."""
