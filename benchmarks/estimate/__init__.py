"""How accurate is `lightning-zenflow estimate`? Its error against measurements, and its predictions for large models."""
