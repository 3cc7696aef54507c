"""The test library: real nodes, real guests, and proof that nothing is left of them."""
