"""The validator: it clones, checks and times forks in a sandbox, and sets verdicts and weights."""
