"""The HTML pages: their data, their plot and their rendering."""
