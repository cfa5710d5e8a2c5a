"""Real models: each engine in its own folder, imported only when it is used."""
