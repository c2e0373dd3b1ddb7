"""Where the settings come from: defaults, .env, environment and flags, checked once."""
