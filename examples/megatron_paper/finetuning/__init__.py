"""Fine-tuning BERT: the tasks of Shoeybi et al. 2019, section 5.3, from public files to metrics."""
