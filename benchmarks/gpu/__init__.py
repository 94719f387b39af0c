"""Does it run on a GPU, and how fast? Tests, step times and a training on a machine that has torch and lightning, but no network."""
