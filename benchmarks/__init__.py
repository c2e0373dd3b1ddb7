"""What is measured, and how: a folder a subject, its commands, data models and page."""
