"""Token dispatchers: who holds which tokens while experts compute, and how tokens get there and back."""
