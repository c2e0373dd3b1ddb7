"""The pages for people: what they show, the plot, and how they are rendered."""
