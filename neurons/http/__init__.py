"""HTTP to a validator API: one bounded reply, one type for each outcome."""
