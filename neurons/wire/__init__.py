"""The interface of miner, validator and API: messages, signatures, rules, and the HTTP client."""
