"""Where attention runs: plans that drive the steps of a request."""
