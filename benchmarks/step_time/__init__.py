"""How long does a step take, and how much of it is waiting? Step times under every method."""
