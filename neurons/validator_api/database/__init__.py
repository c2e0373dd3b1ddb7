"""The API's database: its tables, its versions, and transactions."""
