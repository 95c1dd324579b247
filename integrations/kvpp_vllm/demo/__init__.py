"""The demo: real vLLM on the devices it is built for, KVPP off, on, and on with broadcasts skipped, same prompts."""
