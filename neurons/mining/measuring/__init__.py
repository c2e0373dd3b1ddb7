"""What the miner measures of its fork, and the reports that it keeps and takes up again."""
