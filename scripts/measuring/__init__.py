"""What the measuring commands share: models of their data, limits, and the documents' tables."""
