"""Prefill/decode-disaggregated serving: a KV page comes back only on proof."""
