"""Other methods' changes of the weights that stay."""
