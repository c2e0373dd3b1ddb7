"""What a developer asks of trees and runs: right, faster, why, since when, how far they spread."""
