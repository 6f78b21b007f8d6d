"""Evaluation of GPT models on WikiText and LAMBADA, as in Shoeybi et al. 2019, section 5.3."""
