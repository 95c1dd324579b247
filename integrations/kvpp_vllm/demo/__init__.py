"""The demo: real vLLM on a CPU, KVPP off, on, and on with broadcasts skipped, over the same prompts."""
