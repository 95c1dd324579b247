"""Names of a package of linear-attention kernels, which 0.30.0rc2 imports and no path here calls."""
