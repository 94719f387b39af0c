"""What the user's code finds and does between two steps: weights that it reads or writes, gradients, and the state of single parameters."""
