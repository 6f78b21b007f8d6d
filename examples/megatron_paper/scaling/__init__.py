"""Scaling of GPT models, as in Shoeybi et al. 2019, section 5.1 and appendix, predicted and measured."""
