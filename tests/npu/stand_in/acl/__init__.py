"""Names of the runtime of Ascend."""
