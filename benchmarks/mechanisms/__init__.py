"""What each sequence mixer costs: this project's, the host library's and softmax, in one table."""
