"""To learn from: the ladder of attention kernels and test data. Imports the product, never the other way round."""
