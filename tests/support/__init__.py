"""What tests need and the package does not: small models, and runners of stock vLLM on a CPU."""
