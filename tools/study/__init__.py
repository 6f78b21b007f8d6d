"""Studies: published tables and formulas next to predictions and measurements; each writes its page."""
