"""What miner, validator and API exchange: messages, signatures, rules, and the HTTP client."""
