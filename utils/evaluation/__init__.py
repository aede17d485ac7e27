"""What is measured: losses, questions, result files."""
