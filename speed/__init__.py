"""How fast the layer and the networks are, and how much memory they take: `python -m speed bench`."""
