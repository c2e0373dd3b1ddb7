"""The cases, one file per subject: inputs, implementations, shapes and limits."""
