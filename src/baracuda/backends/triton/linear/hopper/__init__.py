"""The W8A8 GEMMs for sm_90 in Gluon: `gemm` for many tokens, `skinny` for few, and the epilogue they share."""
