"""The running state above single requests: accounts, and later who goes first."""
