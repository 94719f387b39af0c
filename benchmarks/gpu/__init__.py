"""Does it run on a GPU, and how fast? Tests and step times on a machine that has torch and lightning, but no network."""
