"""WKV6, RWKV-6's operator, beside the host library's."""
