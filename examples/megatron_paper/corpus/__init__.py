"""Hygiene of a training corpus, as in Shoeybi et al. 2019, section 4.1."""

NGRAM = 8  # words whose n-grams two texts are compared by
