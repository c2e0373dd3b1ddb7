"""What is measured, one file for each subject: inputs, implementations, shapes and limits."""
