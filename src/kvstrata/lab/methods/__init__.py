"""How well methods choose: recorded attention, the measures on it, divergence and needles."""
